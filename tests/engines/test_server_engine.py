"""The adapter against a server that misbehaves: no sample is lost or counted twice, and errors name the request."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import httpx2
import numpy as np
import pytest

from equivtest.decoder.hub import SHIPPED
from equivtest.engines.base import EngineOptions, ServerOptions
from equivtest.engines.http_client import Unreadable, named_wait_s
from equivtest.engines.registry import open_engine
from equivtest.engines.server_apis import LlamaCppApi, SglangApi, check_answer, get_api
from equivtest.engines.server_engine import ServerEngine
from equivtest.errors import EngineUnavailable, InvalidSetting, RequestFailed, UnknownName
from equivtest.records import Generation, Origin, Request, SamplingParams
from tests.engines.fake_server import TROUBLES, FakeServer, draw_by_position

PROBES = 5
"""Questions that are asked before anything is collected: one, then two of one seed and two of others."""
KEY = "sk-secret-123"


_OPENED: list[ServerEngine] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _OPENED:
        _OPENED.pop().close()


def open_server(off: FakeServer | None, on: FakeServer | None = None, **server: Any) -> ServerEngine:
    options = ServerOptions(
        spec_off=off and off.url, spec_on=on and on.url, **{"backoff_s": 0.001, "timeout_s": 20.0, **server}
    )
    engine = open_engine(EngineOptions(engine="openai", model="tiny", server=options))
    assert isinstance(engine, ServerEngine)
    _OPENED.append(engine)
    return engine


def requests(count: int, *, num_tokens: int = 6, prompts: Sequence[int] = (5, 9), **params: Any) -> list[Request]:
    """As a run asks: all seeds of a prompt, then those of the next."""
    return [
        Request(
            prompt_token_ids=tuple(range(length)),
            params=SamplingParams(**{"temperature": 0.8, **params}),
            stream_key=1000 * length + seed,
            max_tokens=num_tokens,
            label=f"arm on, config topp95, prompt p{length}, seed {seed}",
        )
        for length in prompts
        for seed in range(count)
    ]


def tokens(generations: Sequence[Generation]) -> list[list[int]]:
    return [generation.token_ids.tolist() for generation in generations]


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """What a server that answers at once says."""
    with FakeServer() as server:
        return tokens(open_server(server).generate(requests(8), speculative=False))


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_fails_once_is_asked_again_and_no_sample_is_lost_or_counted_twice(
    trouble: str, right: list[list[int]]
) -> None:
    heard: list[int] = []
    with FakeServer(troubles=[trouble], after=PROBES) as server:
        engine = open_server(server, concurrency=16, **({"timeout_s": 1.0, "retries": 30} if trouble == "slow" else {}))
        made = engine.generate(requests(8), speculative=False, on_tokens=heard.append)
    assert tokens(made) == right
    assert sum(heard) == 16 * 6
    assert "requests were sent again (" in engine.notes()["repeats"]
    if trouble != "slow":  # there a machine that is busy adds repeats of its own
        assert engine.notes()["repeats"].startswith("16 requests")
        assert len(server.bodies[PROBES:]) == 32
        assert set(server.num_answers.values()) <= {1, 2}  # the probes ask one seed twice


@pytest.mark.parametrize("choices", [1, 4])
def test_every_trouble_at_once_changes_no_sample(choices: int) -> None:
    with FakeServer() as calm, FakeServer(troubles=[t for t in TROUBLES if t != "slow"], after=PROBES + 1) as wild:
        expected, made = (
            open_server(server, choices=choices).generate(requests(20), speculative=False) for server in (calm, wild)
        )
    assert tokens(made) == tokens(expected)
    assert len({tuple(text) for text in tokens(made)}) > 35


@pytest.mark.parametrize("trouble", [t for t in TROUBLES if t != "slow"])
def test_what_never_succeeds_is_an_error_that_names_the_request(trouble: str) -> None:
    with FakeServer(troubles=[trouble], after=PROBES, forever=True) as server:
        engine = open_server(server, retries=2, concurrency=1)
        with pytest.raises(
            RequestFailed, match=r"arm on, config topp95, prompt p5, seed 0: .*was asked 3 times"
        ) as error:
            engine.generate(requests(2), speculative=False)
    assert sum(body["seed"] == 5000 for body in server.bodies) == 3
    assert error.value.exit_code == 4


@pytest.mark.parametrize(
    ("indices", "ids", "says"),
    [
        ((0, None), [1, 2], "choices have the indices"),
        ((0, "1"), [1, 2], "choices have the indices"),
        ((0, 1), [1, 2**40], "below 2"),
        ((1, 0), [1, 2], None),
    ],
)
def test_an_answer_of_odd_types_is_unreadable(indices: tuple[Any, ...], ids: list[int], says: str | None) -> None:
    """So it is asked for again, and named with its request."""
    answer = {"choices": [{"index": index, "text": "x", "token_ids": ids} for index in indices]}
    if says is None:
        assert len(get_api("completions").read(answer).choices) == 2
        return
    with pytest.raises(Unreadable, match=says):
        get_api("completions").read(answer)


@pytest.mark.parametrize(("told", "counted"), [(None, 0), ("many", 0), (7, 7)])
def test_a_count_of_drafts_that_is_no_number_is_none(told: object, counted: int) -> None:
    answer = {"content": "x", "tokens": [1], "timings": {"draft_n": told}}
    assert get_api("llamacpp").read(answer).num_drafted == counted


@pytest.mark.parametrize(("told", "waits_s"), [("2.5", 2.5), ("nan", 0.0), ("inf", 0.0), ("Thu, 3 Dec 2026", 0.0)])
def test_a_wait_that_is_no_number_of_seconds_is_none(told: str, waits_s: float) -> None:
    assert named_wait_s(httpx2.Response(429, headers={"retry-after": told})) == waits_s


def test_a_refusal_is_not_repeated_and_shows_the_servers_words() -> None:
    with FakeServer() as server:
        engine = open_server(server)
        server.takes_ids = False
        with pytest.raises(RequestFailed, match=r"seed \d: .*HTTP 422: .*the prompt must be a string"):
            engine.generate(requests(2), speculative=False)
        assert "repeats" not in engine.notes()


def test_a_text_that_ends_early_is_an_error_and_never_asked_for_until_it_does_not() -> None:
    def short(prompt: Sequence[int], body: Mapping[str, Any], index: int) -> list[int]:
        own = draw_by_position()(prompt, body, index)
        return own if body["max_tokens"] > 10 else own[:3]

    with FakeServer(short, finish_reason="stop") as server:
        engine = open_server(server, concurrency=1)
        with pytest.raises(RequestFailed, match=r"seed 0: its text ended where nothing ends a text; .*--forbid-eos"):
            engine.generate(requests(2), speculative=False)
        assert sum(body["seed"] == 5000 for body in server.bodies) == 1


def test_a_stop_token_ends_a_text() -> None:
    def stopping(prompt: Sequence[int], body: Mapping[str, Any], index: int) -> list[int]:
        own = draw_by_position()(prompt, body, index)
        return own if body["max_tokens"] > 10 else [*own[:3], *body["stop_token_ids"]]

    with FakeServer(stopping, finish_reason="stop") as server:
        made = open_server(server).generate(requests(2, stop_token_ids=(77,)), speculative=False)
    assert all(text[3:] == [77] for text in tokens(made))


def test_the_law_is_sent_whole_and_seeds_are_the_samples_own() -> None:
    with FakeServer() as server:
        asked = requests(3, top_p=0.9, top_k=7, min_p=0.1, logit_bias=((3, 1.5),))
        engine = open_server(server, extra_body={"repeat_penalty": 1.0, "top_k": 9})
        engine.generate(asked, speculative=False)
        bodies = server.bodies[PROBES:]
    law = {"temperature": 0.8, "top_p": 0.9, "top_k": 9, "min_p": 0.1, "repetition_penalty": 1.0, "ignore_eos": True}
    for body in bodies:
        assert {name: body[name] for name in law} == law
        assert body["logit_bias"] == {"3": 1.5}
        assert (body["repeat_penalty"], body["model"], body["return_token_ids"]) == (1.0, "fake", True)
    assert sorted(body["seed"] for body in bodies) == sorted(request.stream_key for request in asked)
    with FakeServer(draw_by_position(ignores_seeds=True)) as server:
        open_server(server, seeded=False).generate(asked, speculative=False)
    assert not any("seed" in body for body in server.bodies)


def test_a_server_that_ignores_seeds_is_reported_and_one_that_repeats_a_text_is_refused() -> None:
    with FakeServer(draw_by_position(ignores_seeds=True)) as server:
        notes = open_server(server).notes()
        assert notes == {"seeds off": "the server of arm off does not repeat a text for its seed"}
    with FakeServer() as server:
        assert open_server(server).notes() == {}
    constant = FakeServer(lambda prompt, body, index: [5] * body["max_tokens"])
    with constant as server, pytest.raises(EngineUnavailable, match="the same text to every seed"):
        open_server(server)
    by_request = draw_by_position()
    parrot = FakeServer(lambda prompt, body, index: by_request(prompt, body, 0))
    with parrot as server, pytest.raises(EngineUnavailable, match="the same text for every choice"):
        open_server(server, choices=4)


def test_texts_without_token_ids_are_tokenised_again_and_not_held_against_the_law() -> None:
    from equivtest.decoder.weights import load_tokenizer

    tokenizer, _ = load_tokenizer(SHIPPED["tiny"])
    draw = draw_by_position(first_id=600)  # whole pieces of words: put together, some are other pieces
    with FakeServer(draw, tells_ids=False, decode=tokenizer.decode) as server:
        engine = open_server(server)
        made = engine.generate(requests(8), speculative=False)
    texts = [draw(r.prompt_token_ids, {"max_tokens": 6, "seed": r.stream_key}, 0) for r in requests(8)]
    again = [tokenizer.encode_text(tokenizer.decode(text)) for text in texts]
    assert tokens(made) == [(own + own[-1:] * 6)[:6] for own in again]
    changed = sum(len(own) != 6 for own in again)
    assert changed
    assert engine.notes()["retokenised"].endswith(f"that changed the number of tokens in {changed} of 16")
    assert engine.scorer() is None
    assert "no token ids" in str(engine.refusal(SamplingParams(ignore_eos=False)))
    with FakeServer() as server:
        assert open_server(server).scorer() is not None


def test_prompts_go_as_text_where_the_server_takes_no_ids() -> None:
    with FakeServer(takes_ids=False) as server:
        engine = open_server(server)
        engine.generate(requests(2), speculative=False)
    assert isinstance(server.bodies[-1]["prompt"], str)
    assert "HTTP 422" in engine.notes()["prompts"]
    # The fake makes a token of every byte.
    assert engine.notes()["prompts"].endswith("; it makes 80 tokens of one where the tokenizer makes 20")
    assert engine.describe()["prompts_as"] == "text"


def test_the_key_is_sent_and_never_told(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(key=KEY) as server:
        engine = open_server(server, api_key=KEY)
        engine.generate(requests(1), speculative=False)
        server.key = "another"
        with pytest.raises(RequestFailed, match=r"wrong key Bearer \*\*\*") as error:
            engine.generate(requests(1), speculative=False)
        assert KEY not in str(error.value)
        assert KEY not in repr(ServerOptions(spec_off=server.url, api_key=KEY))
        assert KEY not in str(engine.describe())
    for address in (f"http://user:{KEY}@host", f"http://host?key={KEY}"):
        with pytest.raises(InvalidSetting) as refused:
            ServerOptions(spec_off=address)
        assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"choices": 0}, "choices = 0"),
        ({"spec_off": None}, "needs --spec-off URL"),
        ({"spec_off": "localhost:8000"}, "must be an address"),
        ({"timeout_s": float("nan")}, "timeout_s = nan"),
    ],
)
def test_a_wrong_setting_is_refused(setting: Mapping[str, Any], says: str) -> None:
    with pytest.raises(InvalidSetting, match=says):
        ServerOptions(**{"spec_off": "http://host", **setting})


def test_a_server_that_is_not_there_or_has_many_models_is_told() -> None:
    with pytest.raises(RequestFailed, match=r"the list of models: .*ConnectError"):
        open_engine(
            EngineOptions(
                engine="openai",
                model="tiny",
                server=ServerOptions(spec_off="http://127.0.0.1:9", retries=1, backoff_s=0.001),
            )
        )
    with FakeServer(models=("a", "b")) as server:
        with pytest.raises(InvalidSetting, match="name one of what the server has: a, b"):
            open_server(server)
        assert open_server(server, served_model="b").describe()["model"] == "b"
    with pytest.raises(UnknownName, match="completions, llamacpp, sglang"):
        get_api("ollama")


def test_end_of_text_is_forbidden_in_the_request_and_in_the_law() -> None:
    """The tiny model's end of text has id 2: with --forbid-eos the law gives it no probability."""
    from equivtest.decoder.scorer import FinishedSamples

    with FakeServer() as server:
        plain, forbidding = (open_server(server, forbid_eos=forbid) for forbid in (False, True))
        forbidding.generate(requests(1), speculative=False)
        assert server.bodies[-1]["logit_bias"] == {"2": -100.0}
    p_token = []
    for engine in (plain, forbidding):
        scorer = engine.scorer()
        assert scorer is not None
        samples = FinishedSamples(
            prompt_token_ids=(1, 300, 301),
            params=SamplingParams(),
            token_ids=np.full((1, 1), 2),
            draft_token_ids=np.full((1, 1), -1),
            slots=np.full((1, 1), -1),
            stream_keys=np.zeros(1),
        )
        p_token.append(float(scorer.score(samples).p_token[0, 0]))
    assert p_token[0] > 1e-12 > p_token[1]


def test_llamacpp_is_asked_in_its_own_words() -> None:
    api = LlamaCppApi()
    (request,) = requests(1, prompts=(4,), top_k=5)
    body = api.body(request, request.prompt_token_ids, count=1, seed=7)
    # Its own order applies the temperature last, which is another law.
    assert body["samplers"] == ["temperature", "top_k", "top_p", "min_p"]
    assert (body["prompt"], body["seed"], body["return_tokens"], body["ignore_eos"]) == ([0, 1, 2, 3], 7, True, True)
    answer = api.read(
        {
            "content": "a b",
            "tokens": [5, 6, 7],
            "stop_type": "limit",
            "timings": {"draft_n": 4, "draft_n_accepted": 2},
        }
    )
    assert (answer.choices[0].token_ids, answer.choices[0].ended) == ((5, 6, 7), False)
    assert (answer.num_drafted, answer.num_accepted) == (4, 2)
    check_answer(answer, 1, 2, may_run_over=api.may_run_over, tells=True)
    assert api.refusal(SamplingParams(repetition_penalty=1.2))
    assert api.refusal(SamplingParams(stop_token_ids=(3,)))
    assert api.refusal(SamplingParams(top_p=0.9)) is None


def test_sglang_is_asked_in_its_own_words() -> None:
    api = SglangApi()
    (request,) = requests(1, prompts=(4,))
    body = api.body(request, request.prompt_token_ids, count=2, seed=7)
    assert body["input_ids"] == [0, 1, 2, 3]
    assert body["sampling_params"]["top_k"] == -1
    assert body["sampling_params"]["sampling_seed"] == 7
    told = {"text": "a", "output_ids": [5], "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "length"}}}
    answer = api.read([told, told | {"output_ids": [6]}])
    assert [choice.token_ids for choice in answer.choices] == [(5,), (6,)]
    assert answer.num_tokens == 2


COUNTERS = """# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} 7.0
"""


def test_a_server_that_counts_its_drafts_is_asked_whether_it_made_any() -> None:
    def notes(metrics: Callable[[FakeServer], str] | None) -> str | None:
        server = FakeServer(draw_by_position(speculative=True))
        server.metrics = metrics and (lambda: metrics(server))
        with server:
            engine = open_server(None, server)
            engine.generate(requests(4), speculative=True)
            return engine.notes().get("drafts")

    def counting(server: FakeServer) -> str:
        return COUNTERS.format(drafted=1e3 + 10 * len(server.bodies), accepted=5.0 * len(server.bodies))

    assert notes(counting) == "the server says that it accepted 40 of 80 drafts"
    silent = notes(lambda server: "vllm:num_requests_running 1.0")
    assert silent == "the server of arm on counts no drafts: it does not seem to speculate"
    assert notes(lambda server: "http_requests_total 3.0") is None  # another server: it is trusted
    assert notes(None) is None


def test_what_is_unknown_of_a_speculative_text_is_not_made_up() -> None:
    with FakeServer() as off, FakeServer(draw_by_position(speculative=True)) as on:
        engine = open_server(off, on)
        plain, speculative = (engine.generate(requests(2), speculative=spec)[0] for spec in (False, True))
    assert set(plain.origins) == {Origin.PLAIN}
    assert set(speculative.origins) == {Origin.UNKNOWN}
    assert str(speculative.route) == "spec"
