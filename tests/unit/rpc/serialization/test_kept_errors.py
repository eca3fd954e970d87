"""Errors that futures keep, without the frames of their causes."""

from __future__ import annotations

import pytest

from rpc.serialization.exception_state import to_keep, twin
from rpc.serialization.kept_errors import without_frames


def fail() -> None:
    raise KeyError("inner")


def wrapped() -> ValueError:
    """An error with a cause, as a caller has caught it."""
    with pytest.raises(ValueError, match="outer") as caught:
        wrap()
    return caught.value


def wrap() -> None:
    try:
        fail()
    except KeyError as error:
        raise ValueError("outer") from error


def test_causes_have_notes_in_place_of_their_frames() -> None:
    error = wrapped()
    cause = error.__cause__
    assert cause is not None
    assert without_frames(error) is error
    assert error.__traceback__ is None
    assert cause.__traceback__ is None
    (note,) = cause.__notes__
    assert note.startswith("Raised at:\n")
    assert "in fail\n" in note


def test_an_error_that_a_caller_is_handling_is_left_as_it_is() -> None:
    handled = RuntimeError("is handled")
    try:
        raise handled
    except RuntimeError:
        kept = without_frames(wrapped())  # the first error is the context of its cause
        assert handled.__traceback__ is not None
    assert kept.__cause__ is not None
    assert kept.__cause__.__context__ is handled
    assert not hasattr(handled, "__notes__")


def test_an_error_that_is_handled_can_be_copied() -> None:
    handled = RuntimeError("is handled")
    handled.__cause__ = KeyError("before")
    try:
        raise handled
    except RuntimeError:
        kept = without_frames(wrapped(), copy=twin)
        assert handled.__traceback__ is not None
    assert kept.__cause__ is not None
    copied = kept.__cause__.__context__
    assert copied is not handled
    assert repr(copied) == "RuntimeError('is handled')"
    assert copied is not None
    assert (copied.__traceback__, copied.__cause__, copied.__context__) == (None, None, None)
    assert "in test_an_error_that_is_handled_can_be_copied\n" in copied.__notes__[0]
    assert not hasattr(handled, "__notes__")
    assert handled.__cause__ is not None


def test_members_of_a_group_keep_no_frames() -> None:
    member = wrapped()
    without_frames(ExceptionGroup("several", [member]))
    assert member.__traceback__ is None
    assert member.__cause__ is not None
    assert member.__cause__.__traceback__ is None


def test_a_future_keeps_a_copy_of_an_error_that_was_raised() -> None:
    error = wrapped()
    kept = to_keep(error)
    assert error.__traceback__ is not None
    assert kept.__traceback__ is None
    assert "in wrap\n" in kept.__notes__[0]
