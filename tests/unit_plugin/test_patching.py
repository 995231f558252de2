from __future__ import annotations

import functools
import inspect
import sys
import threading
import types

import pytest

from vllm_ext_plugin import patching

pytestmark = pytest.mark.unit


class Base:
    def inherited(self) -> str:
        return "base"


def new_target() -> type:
    class Target(Base):
        limit = 3

        def method(self, value: int = 1) -> int:
            """Original docstring."""
            return value

        @staticmethod
        def static(value: int) -> int:
            return value

        @classmethod
        def build(cls, value: int) -> tuple[type, int]:
            return cls, value

    return Target


@pytest.fixture(autouse=True)
def clean_registry():
    assert patching.patches() == ()
    yield
    patching.undo_all()


def add_ten(original):
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs) + 10

    return wrapper


def double(original):
    def wrapper(*args, **kwargs):
        return original(*args, **kwargs) * 2

    return wrapper


def test_wraps_a_method_and_keeps_its_identity():
    target = new_target()
    original = target.method
    assert patching.patch(target, "method", add_ten) is True
    assert target().method(5) == 15
    assert target.method.__name__ == "method"
    assert target.method.__doc__ == "Original docstring."
    assert list(inspect.signature(target.method).parameters) == ["self", "value"]
    assert patching.original_of(target, "method") is original
    assert patching.is_patched(target, "method") and not patching.is_patched(target, "static")
    assert str(patching.patches()[0]).endswith("Target.method")


def test_second_application_is_a_no_op():
    target = new_target()
    assert patching.patch(target, "method", add_ten)
    assert not patching.patch(target, "method", add_ten)
    assert target().method(5) == 15
    assert len(patching.patches()) == 1


def test_a_closure_made_anew_counts_as_the_same_patch():
    target = new_target()

    def register() -> bool:
        def wrap(original):
            return lambda self, value=1: original(self, value) + 10

        return patching.patch(target, "method", wrap)

    assert [register(), register(), register()] == [True, False, False]
    assert target().method(5) == 15


def test_different_patches_stack_and_the_original_is_the_first():
    target = new_target()
    original = target.method
    patching.patch(target, "method", add_ten)
    patching.patch(target, "method", double)
    assert target().method(5) == 30
    assert patching.original_of(target, "method") is original
    assert not patching.patch(target, "method", add_ten), "also under another patch"


def test_two_lambdas_in_one_function_are_two_patches():
    target = new_target()
    assert patching.patch(target, "method", lambda f: lambda self, value=1: f(self, value) + 10)
    assert patching.patch(target, "method", lambda f: lambda self, value=1: f(self, value) * 2)
    assert target().method(5) == 30


def test_an_explicit_key_names_the_patch():
    target = new_target()
    assert patching.patch(target, "method", functools.partial(add_ten), key="add")
    assert not patching.patch(target, "method", functools.partial(add_ten), key="add")
    assert target().method(5) == 15


def test_static_and_class_methods_keep_their_kind():
    target = new_target()
    patching.patch(target, "static", add_ten)
    assert isinstance(vars(target)["static"], staticmethod)
    assert target.static(1) == 11 and target().static(1) == 11

    def wrap(original):
        def build(cls, value):
            return original(cls, value + 1)

        return build

    patching.patch(target, "build", wrap)
    assert isinstance(vars(target)["build"], classmethod)
    assert target.build(1) == (target, 2)
    sub = type("Sub", (target,), {})
    assert sub.build(1) == (sub, 2)
    assert patching.original_of(target, "static")(1) == 1


def test_an_inherited_attribute_is_patched_on_the_owner_only():
    target = new_target()

    def shout(original):
        def wrapper(self):
            return original(self).upper()

        return wrapper

    patching.patch(target, "inherited", shout)
    assert target().inherited() == "BASE" and Base().inherited() == "base"
    patching.undo_all()
    assert "inherited" not in vars(target) and target().inherited() == "base"


def test_a_plain_value_can_be_replaced():
    target = new_target()

    def larger(original: int) -> int:
        return original + 1

    patching.patch(target, "limit", larger)
    assert target.limit == 4 and patching.original_of(target, "limit") == 3


def test_undo_restores_exactly_what_was_there():
    target = new_target()
    before = dict(vars(target))
    for name in ("method", "static"):
        patching.patch(target, name, add_ten)
        patching.patch(target, name, double)
    patching.add(target, "extra", lambda self: 1)
    assert patching.undo_all() == 5
    assert dict(vars(target)) == before
    assert patching.patches() == ()
    assert patching.patch(target, "method", add_ten), "can be applied again after undo"


def test_a_module_function_is_repointed_where_it_was_imported(monkeypatch):
    home = types.ModuleType("home")
    home.func = lambda: 1  # type: ignore[attr-defined]
    user, other, late = (types.ModuleType(name) for name in ("user", "other", "late"))
    user.func = home.func  # type: ignore[attr-defined]
    other.func = lambda: 7  # type: ignore[attr-defined]
    for module in (user, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    patching.patch(home, "func", add_ten, imported_by=("user", "other", "late", "never_loaded"))
    assert home.func() == 11 and user.func() == 11
    assert other.func() == 7, "another function of the same name is left alone"
    late.func = home.func  # type: ignore[attr-defined]  # as `from home import func` after the patch does
    monkeypatch.setitem(sys.modules, "late", late)
    patching.undo_all()
    assert (home.func(), user.func(), late.func(), other.func()) == (1, 1, 1, 7)


def test_a_missing_attribute_is_an_error_that_says_what_to_do():
    target = new_target()
    with pytest.raises(
        AttributeError, match=r"Target has no attribute 'gone' to wrap.*vllm_ext_plugin\.seams"
    ):
        patching.patch(target, "gone", add_ten)
    with pytest.raises(AttributeError):
        patching.original_of(target, "gone")
    assert patching.patches() == ()


def test_a_wrapper_that_fails_changes_nothing():
    target = new_target()
    before = dict(vars(target))

    def broken(original):
        raise RuntimeError("no")

    def forgets_to_return(original):
        def wrapper(self):
            return original(self)

    with pytest.raises(RuntimeError):
        patching.patch(target, "method", broken)
    with pytest.raises(TypeError, match="returned None"):
        patching.patch(target, "method", forgets_to_return)
    assert dict(vars(target)) == before and patching.patches() == ()


def test_add_gives_a_new_attribute_once_and_never_replaces_a_foreign_one():
    target = new_target()
    assert patching.add(target, "vllm_ext_call", lambda self: 42)
    assert not patching.add(target, "vllm_ext_call", lambda self: 43)
    assert target().vllm_ext_call() == 42
    with pytest.raises(AttributeError, match="already has"):
        patching.add(target, "method", lambda self: 1)
    with pytest.raises(AttributeError, match="no original"):
        patching.original_of(target, "vllm_ext_call")


def test_many_threads_apply_it_once():
    target = new_target()
    barrier = threading.Barrier(16)
    applied: list[bool] = []

    def run() -> None:
        barrier.wait()
        applied.append(patching.patch(target, "method", add_ten))

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert applied.count(True) == 1 and target().method(5) == 15
