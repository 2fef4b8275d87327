"""Measuring what codecs cost, on the small model that ships with the project."""

import json
from pathlib import Path

import pytest
import torch
from typer import Typer
from typer.testing import CliRunner

from vllm_kvtier import codecs
from vllm_kvtier.cli import quality as command
from vllm_kvtier.codecs.base import Codec, Format
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.quality import cache, likelihood, measure, recall, text
from vllm_kvtier.quality import record as records

pytest.importorskip("transformers")
BF16 = torch.bfloat16
TEXT = [Path(measure.__file__).parent]  # all of the package takes seconds to tokenize
RAW = codecs.get("raw")


class Lossy(Format):
    """Keeps bytes as they are; ``spoil`` is what comes back."""

    name, bound = "lossy", "none"

    def __init__(self, spoil):
        self._spoil = spoil

    def line(self, count):
        return count if count % 64 == 0 else 0

    def data_bytes(self, line):
        return 2 * line

    def scale_bytes(self, line):
        return 0

    def encode(self, x):
        return x.contiguous().view(torch.uint8), x.new_empty((len(x), 0), dtype=torch.uint8)

    def decode(self, data, scales, dtype):
        return self._spoil(data.contiguous().view(dtype))

    def tolerance(self, x):
        return torch.zeros_like(x)

    @property
    def kernels(self):
        return None


EXACT = Codec("exact", "nothing changes", {"k": Lossy(lambda x: x), "v": Lossy(lambda x: x)})
WRECK = Codec("wreck", "no values", {"k": Lossy(lambda x: x), "v": Lossy(torch.zeros_like)})


@pytest.fixture(scope="module")
def loaded(root):
    torch.set_num_threads(1)
    return measure.load(measure.Options(model=str(root / "models" / "recall-6m"), device="cpu"))


@pytest.fixture(scope="module")
def ids(loaded):
    return text.token_ids(loaded[1], text.read(TEXT)[1])


def test_quality_round_trip_of_numbers_through_codec():
    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(cache.round_trip(x, None, BF16), x.to(BF16).float())
    assert torch.equal(cache.round_trip(x, EXACT.formats["k"], BF16), x.to(BF16).float())
    coded = cache.round_trip(x, codecs.get("int8").formats["k"], BF16)
    error = (coded - x).abs().amax(-1) / x.abs().amax(-1)
    assert 0 < error.max() < 0.01  # each line by its own scale, in its own place


def test_quality_bits_include_scales():
    widths = {0: (64, 64), 1: (128, 128)}
    assert cache.bits(RAW, widths) == 16
    # A scale of two bytes for 64 and for 128 numbers.
    assert cache.bits(codecs.get("int8"), widths) == pytest.approx((64 * 8.25 + 128 * 8.125) / 192)


def test_quality_codec_with_unsupported_width_raises():
    with pytest.raises(KVTierError, match="exact cannot keep layer 1's v: 72 numbers"):
        cache.check(EXACT, {0: (64, 64), 1: (64, 72)})
    cache.check(RAW, {0: (72, 72)})


def test_quality_lossless_codec_has_no_loss_and_bad_codec_is_detected(loaded, ids):
    model, tokenizer, _ = loaded
    windows = text.windows(tokenizer, ids, 2, 96)
    wanted = {"exact": EXACT, "int8": codecs.get("int8"), "int4": codecs.get("int4"), "wreck": WRECK}
    steps = []
    nats, found = likelihood.compare(loaded, windows, wanted, lambda: steps.append(1))
    assert len(steps) == 10
    assert found["exact"].divergence == found["exact"].extra_nats == [0, 0] and found["exact"].agreement == [1, 1]
    cost = {name: sum(each.divergence) for name, each in found.items()}
    assert 0 < cost["int8"] < cost["int4"] / 10 < cost["wreck"] / 10
    assert found["wreck"].perplexity()[0] > 1 and max(found["wreck"].agreement) < 0.5
    # The loss is the model's own, transformers computing it.
    own = [model(torch.tensor([w]), labels=torch.tensor([w])).loss.item() for w in windows]
    assert nats == pytest.approx(sum(own) / 2, rel=2e-3)  # the cache rounds to bfloat16


@pytest.mark.gpu
def test_quality_on_gpu_equals_cpu(root, loaded, ids):
    options = measure.Options(model=str(root / "models" / "recall-6m"), device="cuda", dtype="float32")
    windows = text.windows(loaded[1], ids, 2, 256)
    wanted = {name: codecs.get(name) for name in codecs.names() if name != "raw"}
    nats, expected = likelihood.compare(loaded, windows, wanted)
    on_gpu, found = likelihood.compare(measure.load(options), windows, wanted)
    assert on_gpu == pytest.approx(nats, rel=1e-3)
    for name, each in found.items():
        assert sum(each.divergence) == pytest.approx(sum(expected[name].divergence), rel=0.3), name


def test_quality_error_of_single_window_is_infinite():
    one = likelihood.Likelihood([0.01], [0.1], [1.0])
    assert one.perplexity() == (pytest.approx(0.01005, rel=1e-3), float("inf"))
    change, error = likelihood.Likelihood([0.01, 0.03], [0, 0], [1, 1]).perplexity()
    assert change == pytest.approx(0.0202, rel=1e-2) and error == pytest.approx(0.0102, rel=1e-2)


# -- text


class Words:
    """A tokenizer of words, with a beginning as some models have."""

    def __call__(self, words, add_special_tokens=True, verbose=True):
        return {"input_ids": [1] * add_special_tokens + [len(word) for word in words.split()]}


def test_quality_windows_are_spread_and_start_with_bos():
    tokens = list(range(10, 60))
    assert text.windows(Words(), tokens, 2, 11) == [[1, *range(10, 20)], [1, *range(30, 40)]]
    assert len(text.windows(Words(), tokens, 100, 11)) == 5
    with pytest.raises(KVTierError, match="50 tokens"):
        text.windows(Words(), tokens, 1, 60)
    assert text.token_ids(Words(), "a bb") == [1, 2]


def test_quality_text_is_read_from_files_and_folders(tmp_path):
    (tmp_path / "b.py").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\xff")
    assert text.read([tmp_path]) == (tmp_path.name, "first\nsecond")
    assert text.read([tmp_path / "b.py", tmp_path / "a.md"]) == ("b.py, a.md", "second\nfirst")
    for wrong in ("c.bin", "missing"):
        with pytest.raises(KVTierError, match="cannot be read"):
            text.read([tmp_path / wrong])
    name, own = text.read([])
    assert name == text.OWN_SOURCE and "def own_source_is_read" not in own and "class RoundTripCache" in own


# -- recall


def test_quality_recall_chats_have_requested_length_and_code(loaded, ids):
    _, tokenizer, _ = loaded
    made = list(recall.chats(tokenizer, ids, 500, 13))
    assert [len(chat.questions) for chat in made] == [10, 3]
    for chat in made:
        assert 450 < len(chat.shared) < 550
        told = tokenizer.decode(chat.shared)
        for tokens, code in chat.questions:
            answer = tokenizer.decode(tokens[-code:]).strip()
            name = tokenizer.decode(tokens).split("What is the code for ")[1].split("?")[0]
            assert len(answer) == 5 and f"The code for {name} is {answer}." in told
            assert answer not in tokenizer.decode(tokens[:-code])


def test_quality_recall_chat_repeats_short_text(loaded, ids):
    (chat,) = recall.chats(loaded[1], ids[:50], 500, 10)
    assert 450 < len(chat.shared) < 550


def test_quality_recall_exact_codec_keeps_answers_and_bad_loses_them(loaded, ids):
    share, found = recall.compare(loaded, ids, 500, 10, {"exact": EXACT, "wreck": WRECK})
    assert share == 1
    assert found["exact"] == records.RecallAt(500, 10, 10, 10, 0)
    assert found["wreck"] == records.RecallAt(500, 10, 10, 0, 10)


def test_quality_recall_of_failing_model_is_skipped(loaded, ids, monkeypatch):
    monkeypatch.setattr(recall, "answers", lambda loaded, chat, formats: [False] * len(chat.questions))
    assert recall.compare(loaded, ids, 400, 10, {"exact": EXACT}) == (0, {})


def test_quality_recall_works_with_sliding_windows():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1, vocab_size=99)
    model = MistralForCausalLM(MistralConfig(**shape, num_key_value_heads=1, head_dim=64, sliding_window=8)).eval()
    told = torch.randint(99, (40,)).tolist()
    said = model.generate(torch.tensor([told]), max_new_tokens=2, do_sample=False, eos_token_id=None)[0, 40:].tolist()
    wrong = [said[0], (said[1] + 1) % 99]
    chat = recall.Chat(told[:30], [(told[30:] + answer, 2) for answer in (said, wrong, said)])
    assert recall.answers(cache.LoadedModel(model, None, torch.float32), chat, {}) == [True, False, True]


def test_quality_model_without_k_and_v_raises():
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9)).eval()
    with pytest.raises(KVTierError, match="no codec applies"):
        measure._widths(cache.LoadedModel(model, None, BF16), [1, 2, 3])


def test_quality_tokenizer_without_chat_template_raises():
    with pytest.raises(KVTierError, match="no chat template"):
        next(recall.chats(Words(), [1] * 1000, 300, 1))


# -- all of it


def test_quality_command_measures_and_saves_a_record(root, tmp_path):
    app = Typer()
    app.command("quality")(command.quality)
    options = ["--model", str(root / "models" / "recall-6m"), "--codecs", "int8,raw", "--device", "cpu"]
    options += ["--windows", "2", "--window-tokens", "64", "--records", str(tmp_path), "--text", str(TEXT[0])]
    asked = CliRunner().invoke(app, [*options, "--questions", "10", "--lengths", "400,99999", "--json"])
    assert asked.exit_code == 0, asked.output
    record = json.loads(asked.stdout)
    assert records.load(record["fingerprint"], tmp_path).text.windows == 2
    (int8,) = record["codecs"]
    assert int8["bits"] == 8.25 and int8["divergence"] < 0.01
    assert int8["recall"] == [{"tokens": 400, "questions": 10, "raw_right": 10, "right": 10, "lost": 0}]
    assert "recall at 99999 tokens: the model takes 16384" in asked.stderr
    assert str(tmp_path / record["fingerprint"]) in asked.stderr.replace("\n", "")

    table = CliRunner().invoke(app, [*options, "--no-recall"])
    assert table.exit_code == 0 and "int8" in table.stdout and "1.94 x" in table.stdout


def test_quality_table_shows_why_auto_refuses_a_codec(capsys):
    bad = records.CodecQuality("int4", {}, 4.5, 0.02, 0.001, 0.03, 0.93, [records.RecallAt(500, 200, 199, 190, 9)])
    made = records.Record("f" * 32, "m", 0.0, records.Text("t", "d", 2, 64), "bfloat16", "float32 on cpu", 1.8, [bad])
    command.show(made, command.Console(width=200))
    shown = capsys.readouterr().out
    assert "9 of 199" in shown and "perplexity +2.10% with its error" in shown and "+2.00% ± 0.10%" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--codecs", "int9"], "no codec is named 'int9'"),
        (["--codecs", "raw"], "raw changes nothing"),
        (["--text", "/nowhere/at/all"], "cannot be read"),
        (["--lengths", "many"], "numbers separated by commas"),
        (["--dtype", "int3"], "'int3' is none of"),
        (["--device", "abacus"], "cannot load"),
    ],
)
def test_quality_command_error_exits_with_message(root, tmp_path, options, words):
    app = Typer()
    app.command("quality")(command.quality)
    fixed = ["--model", str(root / "models" / "recall-6m"), "--device", "cpu", "--records", str(tmp_path)]
    result = CliRunner().invoke(app, fixed + options)
    assert result.exit_code == 1
    assert words in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_quality_model_with_latent_cache_raises(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v2", "kv_lora_rank": 512}))
    with pytest.raises(KVTierError, match="latent"):
        measure.load(measure.Options(model=str(tmp_path), device="cpu"))


def test_quality_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    from vllm_kvtier.quality.plot import plot

    row = records.CodecQuality("int8", {}, 8.1, 0.001, 0.001, 1e-4, 0.99)
    made = records.Record("f" * 32, "m", 0.0, records.Text("t", "d", 2, 64), "bfloat16", "float32 on cpu", 1.8, [row])
    plot([made, made], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(KVTierError, match="cannot be written"):
        plot([made], tmp_path / "no" / "p.png")
