"""Jobs as optctl answers, read by the client without a daemon."""

import subprocess

import pytest
from optstate import _optctl, errors

PARAMETERS = [{"parameter": {"name": "weight"}}]


@pytest.fixture
def answers(monkeypatch):
    """The answers of optctl by its verb, or the error of each."""
    by_verb = {"describe": {"phase": "JOB_PHASE_READY"}, "get": {"parameters": PARAMETERS}}

    def ask(endpoint, verb, *arguments):
        answer = by_verb[verb]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(_optctl, "ask", ask)
    return by_verb


def test_a_registered_job(answers):
    assert _optctl.find_registered(None, "job") == (answers["describe"], PARAMETERS)


def test_a_job_whose_ranks_were_killed_before_they_registered_it(answers):
    answers["describe"] = {"phase": "JOB_PHASE_EMPTY"}
    answers["get"] = errors.FailedPreconditionError("no layout yet")
    assert _optctl.find_registered(None, "job") is None


@pytest.mark.parametrize("verb", ["describe", "get"])
def test_a_job_that_goes_before_an_answer(answers, verb):
    answers[verb] = errors.NotFoundError("no such job")
    assert _optctl.find_registered(None, "job") is None


def test_a_job_that_has_failed(answers):
    answers["get"] = errors.FailedPreconditionError("it has failed")
    with pytest.raises(errors.FailedPreconditionError):
        _optctl.find_registered(None, "job")


def test_the_daemon_refusal_keeps_its_type():
    with pytest.raises(errors.UnavailableError, match="optctl get jobs"):
        _optctl.ask("unix:/nowhere/optstated.sock", "get", "jobs")
    with pytest.raises(errors.InvalidArgumentError):
        _optctl.ask("unix:/nowhere/optstated.sock", "get", "nonsense")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (2, errors.InvalidArgumentError),
        (3, errors.NotFoundError),
        (4, errors.FailedPreconditionError),
        (5, errors.UnavailableError),
        (6, errors.DataLossError),
        (8, errors.UnimplementedError),
        (1, errors.UnknownError),
    ],
)
def test_each_exit_code_is_an_error_of_its_own(monkeypatch, code, error):
    done = subprocess.CompletedProcess([], code, b"", b"optctl: the reason\n")
    monkeypatch.setattr(_optctl, "_run", lambda endpoint, *arguments, within_s=None: done)
    with pytest.raises(error, match="the reason") as caught:
        _optctl.change(None, "set", "job", "gpt", "private=true")
    assert type(caught.value) is error
