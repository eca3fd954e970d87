"""What ``python -m tests.conformance.xla`` reads in the output of unittest."""

from __future__ import annotations

from tests.conformance.xla import outcomes_in

TEXT = """\
test_a (__main__.One.test_a) ... ok
test_b (__main__.One.test_b)
What it tests. ... printed between
ok
test_c (__main__.One.test_c) ... FAIL
test_d (__main__.One.test_d) ... skipped 'for TPUs'
test_e (__main__.One.test_e) ... a line of a log
ERROR

======================================================================
ERROR: test_e (__main__.One.test_e)
----------------------------------------------------------------------
======================================================================
FAIL: test_c (__main__.One.test_c)
----------------------------------------------------------------------
Ran 5 tests in 1.000s
"""


def test_cases_are_told_apart_though_programs_print_between() -> None:
    found = outcomes_in(TEXT)
    assert found.passed == {"One.test_a", "One.test_b"}
    assert found.failed == {"One.test_c", "One.test_e"}
    assert found.skipped == {"One.test_d"}


WITH_ARGUMENTS = """\
test_a (__main__.One)
One.test_a ... ok
test_b0 (torch.bfloat16) (__main__.One)
One.test_b0 (torch.bfloat16)
test_b(torch.bfloat16) ... ok
test_b1 ((8, 16), (0, None)) (__main__.One)
One.test_b1 ((8, 16), (0, None))
test_b((8, 16), (0, None)) ... FAIL

======================================================================
FAIL: test_b1 ((8, 16), (0, None)) (__main__.One)
----------------------------------------------------------------------
ERROR: setUpClass (__main__.Two)
"""


def test_cases_of_absl_are_told_apart_by_their_numbers() -> None:
    found = outcomes_in(WITH_ARGUMENTS)
    assert found.passed == {"One.test_a", "One.test_b0"}
    assert found.failed == {"One.test_b1", "Two.setUpClass"}


def test_what_has_passed_in_one_run_has_passed() -> None:
    found = outcomes_in(TEXT)
    found.add(outcomes_in("test_c (__main__.One.test_c) ... ok\ntest_a (__main__.One.test_a) ... FAIL\n"))
    assert found.failed == {"One.test_e"}
    assert len(found.passed) == 3


def test_a_file_without_cases_has_failed() -> None:
    found = outcomes_in("Traceback:\nModuleNotFoundError: No module named 'absl'\n")
    assert found.failed
    assert found.said.endswith("No module named 'absl'")
