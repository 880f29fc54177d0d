"""The synthetic decoder draws from the law that it says it does, plainly and speculatively, unless told to be wrong."""

import numpy as np
import pytest
from scipy import stats

from equivtest.bench.synthetic import SyntheticModel, decode, synthetic_model
from equivtest.errors import InvalidSetting
from equivtest.records import Origin
from equivtest.stats.scored import ORIGIN_CODES

NUM_SEEDS = 40_000


def exact_marginal(model: SyntheticModel, prompt: int, position: int):
    """[vocab] law of the token at one position, summed over everything before it."""
    by_context = model.law.reshape(model.num_prompts, model.num_positions, model.vocab, model.vocab)
    law = np.eye(model.vocab)[0]
    for before in range(position + 1):
        law = law @ by_context[prompt, before]
    return law


def misfit(model: SyntheticModel, tokens, prompt: int, position: int) -> float:
    """p-value of Pearson's chi-squared of a cell against its exact law; 0 for a token off the law's support."""
    expected = exact_marginal(model, prompt, position) * NUM_SEEDS
    observed = np.bincount(tokens[prompt, :, position], minlength=model.vocab)
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed, expected = (np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected))
    held = expected > 0
    return float(stats.chi2.sf(((observed - expected)[held] ** 2 / expected[held]).sum(), held.sum() - 1))


@pytest.mark.parametrize("sampled_draft", [False, True], ids=["greedy draft", "sampled draft"])
@pytest.mark.parametrize("max_draft", [0, 3])
def test_every_cell_follows_its_exact_law(max_draft: int, sampled_draft: bool) -> None:
    """12 cells of 40,000 samples each; the smallest p-value is below 1e-5 once in 8,000 draws of a correct decoder.
    The twin: a bias of .1 puts some cell below 1e-20."""
    model = synthetic_model(2, 6, vocab=10, sampled_draft=sampled_draft, seed=3)

    def smallest(epsilon: float) -> float:
        decoded = decode(model, NUM_SEEDS, max_draft=max_draft, epsilon=epsilon, rng=np.random.default_rng(4))
        return min(misfit(model, decoded.tokens, prompt, position) for prompt in range(2) for position in range(6))

    assert smallest(0.0) > 1e-5
    if max_draft:
        assert smallest(0.1) < 1e-20


def test_rounds_look_like_those_of_a_decoder() -> None:
    model = synthetic_model(2, 12, seed=3)
    tokens = decode(model, 50, max_draft=3, rng=np.random.default_rng(5)).scored
    origins = {origin: tokens.origin == code for origin, code in ORIGIN_CODES.items()}
    assert {origin for origin, chosen in origins.items() if chosen.any()} == set(Origin) - {
        Origin.ENDED,
        Origin.UNKNOWN,
    }
    assert (origins[Origin.ACCEPTED] | origins[Origin.RECOVERED])[tokens.has_draft].all()
    assert (tokens.is_draft == origins[Origin.ACCEPTED]).all()
    assert (origins[Origin.BONUS] == tokens.is_bonus_slot).all()
    assert (tokens.slot[origins[Origin.PLAIN]] == -1).all()
    assert (tokens.slot < 3)[~origins[Origin.BONUS]].all()
    rounds = tokens.slot <= 0
    assert (tokens.step[1:] - tokens.step[:-1])[tokens.continues[1:]].tolist() == rounds[1:][
        tokens.continues[1:]
    ].tolist()
    # The last position has no room for a draft, whose round always ends with one token more.
    assert not tokens.has_draft[tokens.position == 11].any()


def test_scored_columns_are_those_of_the_law() -> None:
    model = synthetic_model(1, 5, vocab=9, sampled_draft=True, seed=6)
    decoded = decode(model, 30, max_draft=2, rng=np.random.default_rng(7))
    tokens = decoded.scored
    before = np.concatenate([np.zeros((1, 30, 1), int), decoded.tokens[:, :, :-1]], axis=2).ravel()
    context = tokens.position * model.vocab + before
    law, draft, y = model.law[context], model.draft[context], tokens.token_id
    index = np.arange(len(y))
    p_token = law[index, y]
    assert tokens.p_token == pytest.approx(p_token)
    assert (tokens.p_token > 0).all()
    above = (law * (law > p_token[:, None])).sum(axis=1)
    assert (above <= tokens.pit_rank + 1e-12).all()
    assert (tokens.pit_rank <= above + p_token + 1e-12).all()
    below = np.array([row[:token].sum() for row, token in zip(law, y, strict=True)])
    assert (below <= tokens.pit_vocab + 1e-12).all()
    assert (tokens.pit_vocab <= below + p_token + 1e-12).all()
    assert tokens.entropy == pytest.approx(stats.entropy(law, axis=1))
    surprisal = -np.log(np.where(law > 0, law, 1.0))
    assert tokens.var_surprisal == pytest.approx((law * (surprisal - tokens.entropy[:, None]) ** 2).sum(axis=1))
    q_mean = (law * draft).sum(axis=1)
    assert tokens.q_mean == pytest.approx(q_mean * tokens.has_draft)
    assert tokens.q_token == pytest.approx(draft[index, y] * tokens.has_draft)
    variance = (law * (draft - q_mean[:, None]) ** 2).sum(axis=1)
    assert tokens.q_variance == pytest.approx(variance * tokens.has_draft)


@pytest.mark.parametrize("wrong", [{"num_prompts": 0}, {"num_positions": 0}, {"vocab": 0}], ids=str)
def test_a_model_of_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidSetting):
        synthetic_model(**{"num_prompts": 1, "num_positions": 1, "vocab": 4, "seed": 1, **wrong})
