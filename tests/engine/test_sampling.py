"""Sampling a batch is sampling each row alone; filters keep what they say; draws follow the distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caudex.engine.sampling import SamplingRow, logit_bias, sample, uniform
from caudex.engine.types import SamplingParams

VOCAB = 97


def make_row(
    params: SamplingParams,
    seed: int = 0,
    position: int = 0,
    output: list[int] | None = None,
    banned: tuple[int, ...] = (),
) -> SamplingRow:
    prompt = np.arange(3, dtype=np.int32)
    return SamplingRow(params, seed, position, prompt, output or [], bias=logit_bias(params), banned=banned)


def params_strategy() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        top_p=st.sampled_from([1.0, 0.9, 0.2]),
        top_k=st.sampled_from([0, 1, 5, 90]),
        min_p=st.sampled_from([0.0, 0.1, 1.0]),
        logprobs=st.sampled_from([None, 0, 4]),
        presence_penalty=st.sampled_from([0.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, -0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 2.0]), max_size=2),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(params_strategy(), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_a_row_gives_the_same_bits_in_any_batch(params: list[SamplingParams], seed: int) -> None:
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    rows = [make_row(p, seed + i, i, [4, 4, i]) for i, p in enumerate(params)]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    reverse = sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == reverse


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-40, 5e-324])
def test_the_colder_the_surer(temperature: float) -> None:
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3)) * 30
    params = SamplingParams(temperature=temperature, top_p=0.9)
    sampled = sample(logits, [make_row(params, seed) for seed in range(8)])
    assert [token.token_id for token in sampled] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}])
def test_a_penalty_that_makes_a_logit_infinite_makes_it_sure(filters: dict[str, float]) -> None:
    params = SamplingParams(repetition_penalty=1e-300, **filters)  # type: ignore[arg-type]
    logits = torch.linspace(1, 2, VOCAB)[None]
    assert {sample(logits, [make_row(params, seed)])[0].token_id for seed in range(40)} <= {0, 1, 2}


def plain_distribution(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The slow twin: probabilities after every filter, by full sorts in float64."""
    probabilities = torch.softmax(logits.double() / params.temperature, -1).numpy()
    order = np.argsort(-probabilities, kind="stable")
    kept = order[: params.top_k] if params.top_k else order
    weights = probabilities[kept] / probabilities[kept].sum()
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    keep = (before < params.top_p) & (weights >= weights[0] * params.min_p)
    result = np.zeros_like(probabilities)
    result[kept[keep]] = weights[keep] / weights[keep].sum()
    return result


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=7),
        SamplingParams(temperature=1.5, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.05),
        SamplingParams(temperature=2.0, top_k=20, top_p=0.7, min_p=0.02),
    ],
)
def test_draws_follow_the_filtered_distribution(params: SamplingParams) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    expected = plain_distribution(logits[0], params)
    draws = 8_000
    tokens = sample(logits.expand(draws, -1).contiguous(), [make_row(params, 7, i) for i in range(draws)])
    observed = np.bincount([token.token_id for token in tokens], minlength=VOCAB) / draws
    assert not observed[expected == 0].any(), "a token that the filters exclude was drawn"
    assert np.abs(observed - expected).max() < 4 * np.sqrt(0.25 / draws)


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [11, 5]] = 3.0
    assert sample(logits, [make_row(SamplingParams(temperature=0.0))])[0].token_id == 5


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(1, VOCAB)
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias={9: 100.0})
    token = sample(logits, [make_row(params)])[0]
    expected = torch.log_softmax(logits[0], -1)
    assert token.token_id == 9
    assert token.logprob is not None
    assert token.logprob.logprob == expected[9].item()
    assert [value for _, value in token.logprob.top] == expected.topk(3).values.tolist()


def test_a_banned_token_is_not_chosen_whatever_its_bias() -> None:
    logits = torch.randn(2, VOCAB)
    params = SamplingParams(temperature=0.0, logit_bias={9: 100.0})
    chosen = sample(logits, [make_row(params), make_row(params, banned=(9, 11))])
    assert chosen[0].token_id == 9
    assert chosen[1].token_id not in (9, 11)


def test_a_rank_counts_what_is_likelier() -> None:
    logits = torch.arange(VOCAB, dtype=torch.float32)[None]
    params = SamplingParams(temperature=0.0, logprobs=1, logit_bias={VOCAB - 4: 100.0})
    token = sample(logits, [make_row(params)])[0]
    assert token.logprob is not None
    assert (token.token_id, token.logprob.rank, token.logprob.top[0][0]) == (VOCAB - 4, 4, VOCAB - 1)


def test_penalties_lower_what_was_said() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 20] = 1.0
    logits[0, 30] = 0.9
    presence = make_row(SamplingParams(temperature=0.0, presence_penalty=0.5), output=[20])
    frequency = make_row(SamplingParams(temperature=0.0, frequency_penalty=0.04), output=[20, 20, 20])
    repetition = make_row(SamplingParams(temperature=0.0, repetition_penalty=1.2), output=[20])
    assert [sample(logits, [row])[0].token_id for row in (presence, frequency, repetition)] == [30, 30, 30]


def test_uniform_depends_on_seed_and_position() -> None:
    numbers = np.array([[uniform(seed, position) for position in range(200)] for seed in range(50)])
    assert len(np.unique(numbers)) == numbers.size
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert abs(numbers.mean() - 0.5) < 0.01
    assert np.abs(np.corrcoef(numbers)[~np.eye(50, dtype=bool)]).max() < 0.4
