"""`make serve`: vLLM with this plugin and policies/demo.yaml on the loopback, and two requests to try.

python tools/serve.py [--port 8000] [any option of `vllm serve`]
"""

from __future__ import annotations

import argparse
import json
import sys

from server import (
    DEMO_KEYS,
    DEMO_POLICY,
    SERVED_MODEL,
    Server,
    ServerFailed,
    port_is_free,
    serve_arguments,
    stop_signals_interrupt,
)


def curl_line(url: str, key: str) -> str:
    """One chat request of the tenant that holds `key`, to paste into a shell."""
    body = {
        "model": SERVED_MODEL,
        "messages": [{"role": "user", "content": "Name three rivers."}],
        "max_tokens": 48,
    }
    return (
        f"curl -s {url}/v1/chat/completions -H 'Authorization: Bearer {key}' "
        f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    arguments, more = parser.parse_known_args()
    if not port_is_free(arguments.port):
        print(
            f"port {arguments.port} is taken: stop what listens there, or choose another with "
            f"`make serve PORT={arguments.port + 1}`",
            file=sys.stderr,
        )
        return 1
    try:
        server = Server([*serve_arguments(policy=DEMO_POLICY), *more], port=arguments.port)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    try:
        with stop_signals_interrupt(), server:
            print(
                f"starting vLLM on {server.url}, ready in about half a minute (Ctrl-C stops it) ...",
                flush=True,
            )
            server.wait_ready()
            print(
                f"\nready: {server.url}, policy {DEMO_POLICY.name}. Two requests to try "
                "(usage.prompt_tokens_details.cached_tokens tells what a repeat reused):\n"
            )
            for tenant, key in DEMO_KEYS.items():
                print(f"# {tenant}\n{curl_line(server.url, key)}\n", flush=True)
            return server.wait()
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 0


if __name__ == "__main__":
    sys.exit(main())
