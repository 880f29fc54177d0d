"""The text to learn from: the target's own, held-out questions apart, the same whenever it is made."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import pytest
import torch

from equivtest.engines.decoder import DecoderEngine
from equivtest.errors import InvalidShard, RunMismatch, RunNotFound, UnsupportedModel
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Request, SamplingParams
from equivtest.training import text as module
from equivtest.training.chat_frame import ChatFrame
from equivtest.training.options import TextOptions
from equivtest.training.text import (
    ANSWER_MIX,
    Questions,
    Texts,
    describe_texts,
    read_held_out,
    read_texts,
    sample_texts,
)
from equivtest.training.watch import Silent
from tests.training.conftest import TEXT

GREEDY = list(ANSWER_MIX).index("greedy")


def questions_of(texts: Texts, frame: ChatFrame) -> list[tuple[int, ...]]:
    """What each text asks."""
    opening, closing = len(frame.opening), len(frame.closing)
    rows = zip(texts.token_ids.tolist(), texts.answer_starts.tolist(), strict=True)
    return [tuple(row[opening : start - closing]) for row, start in rows]


def test_the_frame_is_what_the_template_puts_around_any_words(engine: DecoderEngine) -> None:
    frame = ChatFrame.of(engine)
    words = "What is rain?"
    whole = engine.encode_prompt([{"role": "user", "content": words}])
    assert frame.prompt(whole[len(frame.opening) : -len(frame.closing)]) == whole
    assert "".join(map(engine.token_text, frame.opening)) == "<|im_start|>user\n"
    assert "".join(map(engine.token_text, frame.closing)) == "<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_without_a_chat_template_is_refused(engine: DecoderEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "encode_prompt", lambda messages: tuple(messages[0]["content"].encode()))
    with pytest.raises(UnsupportedModel, match="no chat template"):
        ChatFrame.of(engine)


def test_every_text_is_a_question_and_an_answer_of_the_asked_length(engine: DecoderEngine, texts: Texts) -> None:
    frame = ChatFrame.of(engine)
    assert 100 <= len(texts) <= TEXT.num_texts
    assert texts.token_ids.shape[1] == TEXT.text_length
    ends = engine.describe()["eos_token_ids"]
    for row, start in zip(texts.token_ids.tolist(), texts.answer_starts.tolist(), strict=True):
        assert tuple(row[: len(frame.opening)]) == frame.opening
        assert tuple(row[start - len(frame.closing) : start]) == frame.closing
        assert 2 * start <= TEXT.text_length
    assert all(question and not set(question) & set(ends) for question in questions_of(texts, frame))


def test_answers_are_what_the_target_says(engine: DecoderEngine, texts: Texts) -> None:
    """Greedy ones are its greedy continuation, and those sampled hot are not."""
    agrees = []
    for config in range(len(ANSWER_MIX)):
        rows = torch.nonzero(texts.configs == config)[:6, 0].tolist()
        starts = texts.answer_starts[rows].tolist()
        asked = [
            Request(
                prompt_token_ids=tuple(texts.token_ids[row, :start].tolist()),
                params=SamplingParams(temperature=0.0),
                stream_key=row,
                max_tokens=TEXT.text_length - start,
            )
            for row, start in zip(rows, starts, strict=True)
        ]
        said = engine.generate(asked, speculative=False)
        pairs = zip(rows, asked, said, strict=True)
        agrees.append(
            [g.token_ids.tolist() == texts.token_ids[r, len(a.prompt_token_ids) :].tolist() for r, a, g in pairs]
        )
    assert all(agrees[GREEDY])
    assert not any(agrees[0] + agrees[1])


def test_shares_of_the_configurations_are_those_of_the_mix(texts: Texts) -> None:
    counts = describe_texts(texts)["by_config"]
    assert {name: pytest.approx(share, abs=0.03) for name, share in ANSWER_MIX.items()} == {
        name: count / len(texts) for name, count in counts.items()
    }


def test_the_same_options_make_the_same_bytes_and_another_seed_others(engine: DecoderEngine, tmp_path: Path) -> None:
    small = dataclasses.replace(TEXT, num_texts=12, shard_texts=6, num_held_out=4)

    def digests(name: str, options: TextOptions) -> dict[str, str]:
        sample_texts(engine, options, tmp_path / name, Silent())
        return {
            f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in (tmp_path / name).glob("text-*.safetensors")
        }

    first = digests("a", small)
    assert digests("b", small) == first
    assert set(digests("c", dataclasses.replace(small, seed=1)).values()).isdisjoint(first.values())
    # What is missing is made again, and what is there is not touched.
    (tmp_path / "a" / "text-00001.safetensors").unlink()
    kept = (tmp_path / "a" / "text-00000.safetensors").stat().st_mtime_ns
    assert digests("a", small) == first
    assert (tmp_path / "a" / "text-00000.safetensors").stat().st_mtime_ns == kept


def test_held_out_questions_are_not_trained_on(engine: DecoderEngine, folder: Path, texts: Texts) -> None:
    frame = ChatFrame.of(engine)
    held_out = {prompt[len(frame.opening) : -len(frame.closing)] for prompt in read_held_out(folder)}
    assert len(held_out) >= TEXT.num_held_out // 2
    assert not held_out & set(questions_of(texts, frame))


def test_a_question_that_was_held_out_is_dropped_when_it_comes_up_again(engine: DecoderEngine) -> None:
    """The planted fault is the same stream of questions asked twice: without `forbid` every one of them comes again."""
    questions = Questions(engine, TEXT)
    first = questions.sample("x", 8)
    assert questions.sample("x", 8) == first
    questions.forbid(first[:5])
    assert not set(questions.sample("x", 8)) & set(first[:5])


def test_built_in_prompts_are_never_asked(engine: DecoderEngine, tmp_path: Path) -> None:
    """Not even where a prompt file names them, in other letters or inside another text."""
    built_in = [prompt.messages[0][1] for prompt in load_prompt_set("default").prompts]
    asked = [
        built_in[0],
        f"  {built_in[1].upper()} ",
        f"Please: {built_in[2]} Thanks.",
        "Why is honey sweet?",
        "Tell me of rain.",
    ]
    lines = [json.dumps({"id": f"p{i}", "messages": [{"role": "user", "content": t}]}) for i, t in enumerate(asked)]
    content = "\n".join(lines) + "\n"
    (tmp_path / "mine.jsonl").write_text(content)
    (tmp_path / "mine.toml").write_text(f'sha256 = "{hashlib.sha256(content.encode()).hexdigest()}"\n')
    options = dataclasses.replace(
        TEXT, num_texts=8, num_held_out=0, prompts=str(tmp_path / "mine.jsonl"), prompts_share=0.5
    )
    texts = sample_texts(engine, options, tmp_path / "text", Silent())
    said = ["".join(map(engine.token_text, question)) for question in questions_of(texts, ChatFrame.of(engine))]
    assert said[:4] == asked[3:] * 2
    assert not any(prompt.casefold() in " ".join(one.casefold().split()) for prompt in built_in for one in said)


def test_a_folder_of_other_options_is_refused(engine: DecoderEngine, folder: Path) -> None:
    with pytest.raises(RunMismatch, match="text_length"):
        sample_texts(engine, dataclasses.replace(TEXT, text_length=64), folder, Silent())


def test_sampling_stops_when_its_time_is_over(
    engine: DecoderEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(0, 10_000, 45))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(ticks)))
    options = dataclasses.replace(TEXT, num_texts=40, shard_texts=4, num_held_out=0, minutes=3.0)
    texts = sample_texts(engine, options, tmp_path, Silent())
    assert 0 < len(texts) < 40
    assert len(read_texts(tmp_path)) == len(texts)


def test_questions_that_never_end_are_an_error(engine: DecoderEngine, tmp_path: Path) -> None:
    options = dataclasses.replace(TEXT, num_texts=2, question_length=1, num_held_out=0)
    with pytest.raises(UnsupportedModel, match="none of 6 questions"):
        sample_texts(engine, options, tmp_path, Silent())


def test_files_that_are_no_texts_are_named(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match="no texts"):
        read_texts(tmp_path)
    (tmp_path / "text-00000.safetensors").write_bytes(b"nothing")
    with pytest.raises(InvalidShard, match="text-00000"):
        read_texts(tmp_path)
