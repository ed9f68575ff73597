"""Requests for prompt outputs and checks of these outputs, for the tests of every executor."""

import numpy as np

from engine.core.types import Request, Sampling

READ_LEN = 65
SCORES = Sampling(1, temperature=0, num_prompt_logprobs=2)
LAST, MEAN = (Sampling(0, pooling=pooling) for pooling in ("last", "mean"))


def run(loop, *requests):
    """Return the token ids, the prompt outputs and the finish reasons of the requests, each by request id."""
    token_ids = {each.request_id: [] for request in requests for each in (request, *request.forks)}
    outputs, ends = {}, {}
    for request in requests:
        loop.add(request)
    while not loop.is_idle:
        for update in loop.step():
            name = update.request.request_id
            token_ids[name] += update.token_ids
            if update.prompt_outputs:
                assert name not in outputs, "the outputs of a prompt come once"
                outputs[name] = update.prompt_outputs
            ends[name] = update.finish_reason or ends.get(name)
    return token_ids, outputs, ends


def a_request(name, prompt, sampling):
    return Request(name, list(prompt), len(prompt), sampling)


def hidden_of(outputs):
    return np.frombuffer(outputs.pooled, np.float32)


def requests_of(prompt):
    return [a_request(name, prompt, each) for name, each in (("scores", SCORES), ("last", LAST), ("mean", MEAN))]


def check_like_transformers(outputs, expected, family):
    scores = [each.chosen for each in outputs["scores"].prompt_logprobs]
    np.testing.assert_allclose(scores, expected[f"{family}_scores"], rtol=0, atol=1e-4)
    for name in ("last", "mean"):
        np.testing.assert_allclose(hidden_of(outputs[name]), expected[f"{family}_{name}"], rtol=0, atol=1e-4)
