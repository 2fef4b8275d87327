"""Questions of the ``kvtier`` commands to an engine."""

from source_fakes import load_context

from vllm_kvtier.scheduler.admin import admin_requests
from vllm_kvtier.scheduler.admin.admin_requests import AdminRequests
from vllm_kvtier.wire import messages as m


def test_admin_requests_beyond_what_a_step_may_answer_are_refused():
    """While a step goes on, a client asks without end: the next step does not wait for all of its answers."""
    requests = AdminRequests(load_context([(4, None)], 4), None, None, None, None, wake=lambda: None)
    answers = []
    for number in range(1000):
        requests.ask(m.Inspect(number), answers.append)
    assert len(requests.waiting) == admin_requests.MAX_WAITING
    assert len(answers) == 1000 - admin_requests.MAX_WAITING
    assert {(type(answer), answer.code) for answer in answers} == {(m.LeaseRefused, "peer_busy")}
    requests.waiting.clear()
    requests.ask(m.Inspect(1000), answers.append)
    assert len(requests.waiting) == 1
