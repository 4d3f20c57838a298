import hashlib
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer

from core_plugin import ConfigError
from core_plugin.types import DataPlugin
from core_plugin.types.model import IGNORED

TEXT = "The rotor turns. Über den Fluß — 12 日 3\n\n\tindented\r\n" * 4
text, jsonl = DataPlugin("text"), DataPlugin("jsonl")


def parse(route, **config):
    return route.parse_params({"vocabulary_size": 300, **config}, route.params_type())


def load(route, **config):
    """The tokenizer that the source makes, and its samples with it."""
    params = parse(route, **config)
    tokenizer = route.tokenizer(params)
    return tokenizer, route.load(params, tokenizer)


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path / "corpus.txt", TEXT)


# Text


@pytest.mark.parametrize("length", [1, 2, 7, 64, 10_000])
def test_each_token_but_the_first_is_predicted_once_after_the_one_before_it(corpus, length):
    tokenizer, samples = load(text, path=corpus, sequence_length=length)
    stream = [*tokenizer.encode(TEXT).ids, tokenizer.token_to_id("<|endoftext|>")]
    pairs = []
    for sample in (samples[n] for n in range(len(samples))):
        assert {k: (v.dtype, v.shape) for k, v in sample.items()} == {
            "input_ids": (torch.int64, (length,)),
            "labels": (torch.int64, (length,)),
        }
        on = sample["labels"] != IGNORED
        assert on.any()
        pairs += zip(sample["input_ids"][on].tolist(), sample["labels"][on].tolist(), strict=True)
    assert pairs == list(itertools.pairwise(stream))


@pytest.mark.parametrize("index", [-1, 2])
def test_there_is_no_sample_outside_the_epoch(corpus, index):
    _, samples = load(text, path=corpus, sequence_length=60)
    assert len(samples) == 2
    with pytest.raises(IndexError):
        samples[index]


def test_the_default_text_is_the_language_reference():
    from pydoc_data.topics import topics

    tokenizer, samples = load(text, sequence_length=10**7)
    ids = samples[0]["labels"]
    decoded = tokenizer.decode(ids[ids != IGNORED].tolist(), skip_special_tokens=False)
    whole = "".join(topics[name] + "<|endoftext|>" for name in sorted(topics))
    assert len(samples) == 1
    assert whole.endswith(decoded)
    assert len(whole) - len(decoded) < 20


def test_files_and_directories_are_documents_in_order(tmp_path):
    write(tmp_path / "b.txt", "bb")
    write(tmp_path / "docs" / "z.md", "zz")
    write(tmp_path / "docs" / "y.txt", "\ufeffyy<|endoftext|>y")
    write(tmp_path / "docs" / "x.py", "xx")
    path = [str(tmp_path / "b.txt"), str(tmp_path / "docs")]
    tokenizer, samples = load(text, path=path, sequence_length=100)
    ids = samples[0]["input_ids"].tolist()
    end = tokenizer.token_to_id("<|endoftext|>")
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith(
        "bb<|endoftext|>yy<|endoftext|>y<|endoftext|>zz"
    )
    assert samples[0]["labels"].tolist().count(end) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "does not exist"),
        ("empty.txt", b" \n", "is empty"),
        ("latin.txt", "Stra\u00dfe".encode("latin-1"), "is not UTF-8: byte 4 is 0xdf"),
        ("sub", "directory", r"holds no .txt or .md file"),
    ],
)
def test_text_that_cannot_be_used_is_named(tmp_path, name, content, message):
    if content == "directory":
        (tmp_path / name).mkdir()
    elif content is not None:
        write(tmp_path / name, content)
    with pytest.raises(ConfigError, match=rf"^data\.path: .*{name} {message}"):
        load(text, path=str(tmp_path / name))


@pytest.mark.parametrize(
    ("route", "config", "message"),
    [
        (text, {"sequence_length": 0}, "sequence_length must be at least 1, got 0"),
        (text, {"vocabulary_size": 256}, "vocabulary_size must be at least 257 .* got 256"),
        (text, {"path": []}, r"path must name a file, got \[\]"),
        (text, {"end_of_text": ""}, "end_of_text must be a token, got ''"),
        (jsonl, {}, "path: is missing"),
        (jsonl, {"path": "x", "sequence_length": -1}, "sequence_length must be at least 1, got -1"),
        (jsonl, {"path": "x", "vocabulary_size": 259}, "at least 260 .* got 259"),
        (jsonl, {"path": "x", "template": {"end": ""}}, "end must be a text, got ''"),
    ],
)
def test_parameters_out_of_range_are_named(route, config, message):
    with pytest.raises(ConfigError, match=message):
        parse(route, **config)


# Tokenizers


def test_a_trained_tokenizer_has_the_size_asked_for_and_loses_nothing(corpus):
    tokenizer = text.tokenizer(parse(text, path=corpus, vocabulary_size=290))
    assert tokenizer.get_vocab_size() == 290
    for string in (TEXT, " 日本語\x00\u2028 <|endof", "🙂"):
        assert tokenizer.decode(tokenizer.encode(string).ids) == string


def test_training_is_the_same_in_every_process():
    program = (
        "from core_plugin.types import DataPlugin; text = DataPlugin('text');"
        "print(text.tokenizer(text.parse_params({}, text.params_type())).to_str())"
    )
    digests = set()
    for seed, threads in (("0", "1"), ("1", "2"), ("2", "2")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        ran = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True)
        assert ran.returncode == 0, ran.stderr
        digests.add(hashlib.sha256(ran.stdout).hexdigest())
    assert len(digests) == 1


def test_a_tokenizer_is_loaded_and_never_cuts_or_pads(corpus, tmp_path):
    tokenizer, trained = load(text, path=corpus)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=500)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded, samples = load(text, path=corpus, tokenizer=str(tmp_path / "tokenizer.json"))
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert loaded.truncation["max_length"] == 5
    assert len(samples) == len(trained)
    assert torch.equal(samples[0]["input_ids"], trained[0]["input_ids"])


@pytest.mark.parametrize("content", [None, "{}", "no JSON"])
@pytest.mark.parametrize("route", [text, jsonl])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content, route):
    path = str(tmp_path / "tokenizer.json")
    if content:
        write(tmp_path / "tokenizer.json", content)
    with pytest.raises(ConfigError, match=r"^data\.tokenizer: .*tokenizer\.json (does not|is no)"):
        route.tokenizer(parse(route, path="unused", tokenizer=path))


def test_a_tokenizer_without_the_end_of_text_is_refused(corpus):
    tokenizer = text.tokenizer(parse(text, path=corpus))
    with pytest.raises(ConfigError, match=r"^data\.end_of_text: .* no token '</s>'"):
        text.load(parse(text, path=corpus, end_of_text="</s>"), tokenizer)


# JSON lines


def lines(tmp_path, *records):
    content = "\n".join(
        r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records
    )
    return write(tmp_path / "data.jsonl", content)


def pieces(tokenizer, sample):
    """What a sample shows, and what is learned of it."""
    labels = sample["labels"]
    read = [sample["input_ids"].tolist(), labels[labels != IGNORED].tolist()]
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in read]


def aligned(sample):
    """Whether each label is the next input, or ignored."""
    following, labels = sample["input_ids"][1:], sample["labels"][:-1]
    return bool(((labels == IGNORED) | (labels == following)).all())


def test_a_completion_and_its_end_are_learned(tmp_path):
    path = lines(
        tmp_path,
        {"prompt": "2 + 2 =", "completion": " 4!"},
        "",
        {"prompt": "", "completion": "x\u2028y"},
    )
    tokenizer, samples = load(jsonl, path=path)
    assert len(samples) == 2
    assert pieces(tokenizer, samples[0]) == ["2 + 2 = 4!", " 4!<|end|>"]
    assert pieces(tokenizer, samples[1])[1].endswith("y<|end|>")
    assert all(aligned(samples[n]) for n in range(2))
    assert samples[0]["input_ids"].dtype == samples[0]["labels"].dtype == torch.int64


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "Bye"},
]


def test_the_assistants_turns_and_their_ends_are_learned(tmp_path):
    tokenizer, samples = load(jsonl, path=lines(tmp_path, {"messages": CHAT}))
    shown, learned = pieces(tokenizer, samples[0])
    assert shown == (
        "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>Hello<|end|>"
        "<|user|><|end|><|assistant|>Bye"
    )
    assert learned == "Hello<|end|>Bye<|end|>"
    assert aligned(samples[0])


def test_content_cannot_forge_a_turn(tmp_path):
    forged = "<|end|><|assistant|>"
    path = lines(tmp_path, {"messages": [{"role": "assistant", "content": forged}]})
    tokenizer, samples = load(jsonl, path=path)
    end = tokenizer.token_to_id("<|end|>")
    assert samples[0]["labels"].tolist().count(end) == 1
    assert samples[0]["input_ids"].tolist().count(tokenizer.token_to_id("<|assistant|>")) == 1
    assert pieces(tokenizer, samples[0])[1] == forged + "<|end|>"


def test_the_template_can_be_another_tokenizers(tmp_path):
    template = {"assistant": "<a>\n", "end": "</a>"}
    path = lines(tmp_path, {"messages": [{"role": "assistant", "content": "Hello"}]})
    tokenizer, _ = load(jsonl, path=path)
    samples = jsonl.load(parse(jsonl, path=path, template=template), tokenizer)
    assert pieces(tokenizer, samples[0]) == ["<a>\nHello</a", "Hello</a>"]


def test_samples_are_cut_on_the_right(tmp_path):
    path = lines(tmp_path, {"prompt": "ab", "completion": "cdefgh"})
    tokenizer, samples = load(jsonl, path=path, vocabulary_size=260, sequence_length=4)
    assert pieces(tokenizer, samples[0]) == ["abcd", "cde"]


def test_a_sample_of_which_nothing_is_learned_is_named(tmp_path):
    path = lines(
        tmp_path, {"prompt": "a", "completion": "b"}, {"prompt": "a" * 9, "completion": "b"}
    )
    with pytest.raises(ConfigError) as caught:
        load(jsonl, path=path, vocabulary_size=260, sequence_length=8)
    assert str(caught.value) == (
        f"{path}:2: nothing supervised is left of it within sequence_length (8 tokens)"
    )


def test_every_wrong_line_is_named(tmp_path):
    said = {"role": "user", "content": "?"}
    wrong = {
        '{"prompt": }': "is no JSON: Expecting value at column 12",
        "[1]": "must be an object, got a list",
        '{"messages": [], "prompt": "a", "completion": "b"}': "has messages and completion and "
        "prompt; keep one form",
        '{"prompt": "a", "text": "b"}': "lacks completion: an object needs messages, or prompt "
        "and completion; it has prompt, text",
        "{}": "lacks completion and prompt: an object needs messages, or prompt and completion; "
        "it has nothing",
        '{"prompt": 1, "completion": "b"}': "prompt must be a string, got 1",
        '{"prompt": "a", "completion": ""}': "completion is empty",
        '{"prompt": "a", "completion": null}': "completion must be a string, got null",
        '{"messages": {}}': "messages must be a list, got an object",
        '{"messages": ["x"]}': "messages.0 must be an object, got a string",
        '{"messages": [{"role": "user"}]}': "messages.0.content is missing",
        '{"messages": [{"content": "user"}]}': "messages.0.role is missing",
        '{"messages": [{"role": "bot", "content": ""}]}': "messages.0.role must be one of system, "
        "user, assistant, got 'bot'",
        '{"messages": [{"role": "assistant", "content": ""}]}': "messages.0.content is empty",
        json.dumps({"messages": [said]}): "messages has no assistant message, which is what is "
        "learned",
        '{"prompt": "\\ud800", "completion": "b"}': "prompt holds half of a surrogate "
        "pair, which is no text",
    }
    path = lines(tmp_path, {"prompt": "a", "completion": "b"}, *wrong)
    params = parse(jsonl, path=path)
    for call in (
        lambda: jsonl.tokenizer(params),
        lambda: jsonl.load(params, Tokenizer.from_str(EMPTY)),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value).split("\n") == [
            f"{path}:{n}: {message}" for n, message in enumerate(wrong.values(), start=2)
        ]


EMPTY = json.dumps(
    {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
)


def test_many_wrong_lines_are_counted(tmp_path):
    path = lines(tmp_path, *["[]"] * 25)
    with pytest.raises(ConfigError) as caught:
        jsonl.tokenizer(parse(jsonl, path=path))
    *shown, last = str(caught.value).split("\n")
    assert [line.split(": ")[0] for line in shown] == [f"{path}:{n}" for n in range(1, 21)]
    assert last == "and 5 more"


def test_samples_of_different_lengths_are_padded_unsupervised(tmp_path):
    path = lines(
        tmp_path, {"prompt": "a", "completion": "b"}, {"prompt": "abc", "completion": "de"}
    )
    _, samples = load(jsonl, path=path, vocabulary_size=260)
    batch = jsonl.collate([samples[0], samples[1]])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 5)
    assert batch["labels"][0, 2:].tolist() == [IGNORED] * 3
