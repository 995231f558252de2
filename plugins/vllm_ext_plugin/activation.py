"""From `pip install` to an active plugin: the two options, and what happens when the plugin is named.

Installed but not named: only `EngineArgs.add_cli_args` is wrapped, so that `vllm serve --help` shows the
options. Named, by `--plugins vllm_ext` or in the environment variable `VLLM_PLUGINS`:
`EngineArgs.create_engine_config` is wrapped too, which installs the rest where the policy asks for it. Both
variables are inherited by vLLM's child processes, which call `register` again.
"""

from __future__ import annotations

import argparse
import logging
import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm_ext_plugin.patching import patch

PLUGIN = "vllm_ext"
PLUGINS_ENV = "VLLM_PLUGINS"
POLICY_ENV = "VLLM_EXT_POLICY"
CHAT_TEMPLATE_ENV = "VLLM_EXT_CHAT_TEMPLATE"
"""Set by us for the engine process, which renders registered shared prefixes with the server's own
`--chat-template`.
"""

EPHEMERAL_SECRET_ENV = "VLLM_EXT_EPHEMERAL_SECRET"
"""A random salt secret that a server's processes inherit, where the policy names none."""

PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.endpoint_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)

logger = logging.getLogger("vllm_ext")


def register() -> None:
    """Idempotent in any process. An exception before the plugin is named is logged and leaves vLLM as it
    is.
    """
    try:
        from vllm.engine.arg_utils import EngineArgs

        patch(EngineArgs, "add_cli_args", _with_our_options)
    except Exception:
        if is_named():
            raise
        logger.warning("vllm_ext is installed but cannot add its options to this vLLM", exc_info=True)
    if is_named():
        activate()
    elif os.environ.get(POLICY_ENV):
        _refuse_to_run_without_us()


def is_named() -> bool:
    return PLUGIN in named_plugins()


def named_plugins() -> list[str]:
    return [name.strip() for name in os.environ.get(PLUGINS_ENV, "").split(",") if name.strip()]


def installed_plugins() -> dict[str, list[str]]:
    """Names that may follow `--plugins`, each with the entry point groups that hold it."""
    found: dict[str, list[str]] = {}
    for group in PLUGIN_GROUPS:
        for entry_point in entry_points(group=group):
            found.setdefault(entry_point.name, []).append(
                group.removeprefix("vllm.").removesuffix("_plugins")
            )
    return dict(sorted(found.items()))


def _refuse_to_run_without_us() -> None:
    """Somebody set a policy and forgot to name the plugin: an engine that ignores it must not start."""
    from vllm.engine.arg_utils import EngineArgs

    logger.error(
        "%s is set but %s does not name %s: engines will refuse to start", POLICY_ENV, PLUGINS_ENV, PLUGIN
    )
    patch(EngineArgs, "create_engine_config", _unless_named)


def _unless_named(original: Any) -> Any:
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get(POLICY_ENV) and not is_named():
            raise ValueError(
                f"{POLICY_ENV} is set but the plugin is not named: add --plugins {PLUGIN} "
                f"(or {PLUGINS_ENV}={PLUGIN}), or unset {POLICY_ENV}"
            )
        return original(self, *args, **kwargs)

    return create_engine_config


def activate() -> None:
    """Make the named plugin live in this process. Idempotent.

    Raises:
        RuntimeError: this vLLM lacks a symbol that we cannot do without.
    """
    from vllm.engine.arg_utils import EngineArgs

    from vllm_ext_plugin import cpu_sampling, engine_config, seams

    problems = [problem for problem in seams.check() if problem.fatal]
    if problems:
        raise RuntimeError(
            "vllm_ext does not fit this vLLM and refuses to start:\n"
            + "\n".join(f"  {problem}" for problem in problems)
        )
    _declare_environment()
    log_like_vllm()
    version = seams.installed_version()
    if version is not None and not seams.supported_version(version):
        logger.warning("vLLM %s is not one of the versions vllm_ext is tested with (0.31 to 0.33)", version)
    if patch(EngineArgs, "create_engine_config", engine_config.with_policy):
        cpu_sampling.mend()
        unknown = [name for name in named_plugins() if name not in installed_plugins()]
        if unknown:
            logger.error(
                "%s names plugins that are not installed: %s. %s",
                PLUGINS_ENV,
                ", ".join(unknown),
                _found_text(),
            )


def _declare_environment() -> None:
    """Make vLLM's check of `VLLM_*` variables know ours, else `--fail-on-environ-validation` would refuse
    them.

    The check asks for names only. What vLLM reads as a value it may also show (`/server_info`) or put into
    compile cache keys and their files, and ours may be secrets: so for vLLM none of them has a value.
    """
    from vllm import envs

    ours = (POLICY_ENV, CHAT_TEMPLATE_ENV, EPHEMERAL_SECRET_ENV)
    for name in (*ours, *(name for name in os.environ if name.startswith("VLLM_EXT_"))):
        envs.environment_variables.setdefault(name, _no_value)


def _no_value() -> None:
    return None


def log_like_vllm() -> None:
    """Our loggers write where vLLM's do, in its format, unless the application has set them up itself."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_ext")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate


def _with_our_options(original: Any) -> Any:
    def add_cli_args(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> argparse.ArgumentParser:
        parser = original(parser, *args, **kwargs)
        if any(action.dest == "plugins" for action in parser._actions):
            return parser  # this vLLM (or another plugin) has an option of that name: leave it alone
        group = parser.add_argument_group(
            title="vllm_ext",
            description="Multi-tenant prefix caching and retention.",
        )
        group.add_argument(
            "--plugins",
            metavar="NAME[,NAME]",
            default=None,
            help="Plugins to load, e.g. vllm_ext (the same as the environment variable VLLM_PLUGINS). "
            "Installed here: " + ", ".join(installed_plugins()) + ".",
        )
        group.add_argument(
            "--policy",
            metavar="FILE",
            default=None,
            help="Policy file of vllm_ext (the same as the environment variable VLLM_EXT_POLICY). Check it "
            "with `vllm-ext policy check FILE`. Without it the built-in default policy is used. "
            "Needs --plugins vllm_ext.",
        )
        _act_after_parsing(parser)
        return parser

    return add_cli_args


def _act_after_parsing(parser: argparse.ArgumentParser) -> None:
    """Look at both options together once they are parsed: their order on the command line must not matter."""
    parse_known_args = parser.parse_known_args

    def parse_and_act(*args: Any, **kwargs: Any) -> Any:
        parsed = parse_known_args(*args, **kwargs)
        namespace = parsed[0] if isinstance(parsed, tuple) else parsed
        if namespace is not None:
            _apply_options(parser, namespace)
        return parsed

    parser.parse_known_args = parse_and_act  # type: ignore[method-assign]


def _apply_options(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> None:
    plugins, policy = getattr(namespace, "plugins", None), getattr(namespace, "policy", None)
    if plugins is not None:
        names = [name.strip() for name in plugins.split(",") if name.strip()]
        unknown = [name for name in names if name not in installed_plugins()]
        if unknown or not names:
            wanted = ", ".join(map(repr, unknown)) or repr(plugins)
            parser.error(f"--plugins: no plugin named {wanted}. {_found_text()}")
        os.environ[PLUGINS_ENV] = ",".join(names)
    if policy is not None:
        if not is_named():
            parser.error(f"--policy needs --plugins {PLUGIN} (or {PLUGIN} in {PLUGINS_ENV})")
        os.environ[POLICY_ENV] = str(Path(policy).absolute())
    if not is_named():
        if os.environ.get(POLICY_ENV):
            parser.error(f"{POLICY_ENV} is set but the plugin is not named: add --plugins {PLUGIN}")
        return
    if getattr(namespace, "chat_template", None):
        os.environ[CHAT_TEMPLATE_ENV] = str(namespace.chat_template)
    problem = _policy_problem()
    if problem:
        parser.error(problem)
    activate()


def _policy_problem() -> str | None:
    """Read the policy once at the command line, so that a mistake is one clear message and not a traceback
    later.
    """
    from vllm_ext.policy import PolicyError, load_policy

    path = os.environ.get(POLICY_ENV)
    if path is None:
        return None
    try:
        load_policy(Path(path))
    except PolicyError as error:
        return f"the policy cannot be used:\n{error}"
    return None


def _found_text() -> str:
    found = installed_plugins()
    if not found:
        return "No vLLM plugins are installed."
    return "Plugins found: " + ", ".join(f"{name} ({', '.join(groups)})" for name, groups in found.items())
