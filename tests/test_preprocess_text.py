"""Laws of the tokenizer: one model file, the same ids in Python and in a TensorFlow graph, nothing lost unsaid."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import pickle
import random
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mmattn.metrics import normalize_caption
from mmattn.preprocess.normalization import NORMALIZATIONS
from mmattn.preprocess.text import Tokenizer
from mmattn.preprocess.words import group_words

DATA = Path(os.environ.get("MMATTN_DATA", Path(__file__).parents[1] / ".." / "shared" / "data"))
FLICKR, ENJA = DATA / "flickr8k" / "captions.jsonl", DATA / "enja" / "train.ja"
MULTI30K, SEGMENTED = DATA / "multi30k" / "raw" / "test_2017_flickr.de.gz", DATA / "multi30k_bpe_en_de"
SHAKESPEARE = DATA / "tinyshakespeare" / "input.txt"

TEXTS = [
    "A dog runs on the grass .",
    "Two dogs play with a man's red ball !",
    "A woman in a blue-and-white dress is climbing the stairs .",
    "两只狗在路上打架。",
    "穿着连衣裙的小女孩。",
    "犬 が 公園 を 走 っ て い る 。",
    "طفلة صغيرة تتسلق إلى مسرح خشبي",
] * 3
ODD = [
    "",
    "   ",
    " a\u00a0dog\u3000runs\t\n on ",
    "🐕 👩‍👩‍👧 ❤️ 1️⃣ 🏳️‍🌈",
    "cafe\u0301 E\u0301\u0302 \u0301x \u1112\u1161\u11ab",
    "don\u2019t \u201cstop\u201d",
    "a\x00b \ufeffx \u200b\u200f",
    "\u2581 <s> </s> <unk> <pad> \u2047",
    "ﬁne №1 Ⅷ ① İstanbul STRASSE ß",
]
HALF_WIDTH = str.maketrans({unicodedata.normalize("NFKC", c): c for c in map(chr, range(0xFF66, 0xFFA0))})
KINDS = [(n, m, b) for n in ("none", "caption") for m in ("bpe", "unigram") for b in (False, True)]
KINDS += [("nfc", "bpe", True), ("nfkc", "unigram", False), ("nfkc_lower", "bpe", True)]
KINDS += [("none", "char", False), ("nfkc", "char", False), ("none", "word", False), ("nfkc_lower", "word", False)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(map(str, kind)))
def tokenizer(request) -> Tokenizer:
    normalization, model_type, byte_fallback = request.param
    return Tokenizer.train(
        TEXTS, 420, model_type, normalization=normalization, byte_fallback=byte_fallback, shrink=True
    )


@pytest.fixture(scope="module")
def captions() -> Tokenizer:
    return Tokenizer.train(TEXTS, 150, normalization="caption")


@pytest.fixture(scope="module")
def exact() -> Tokenizer:
    return Tokenizer.train(TEXTS, 400, byte_fallback=True)


def noise(count: int) -> list[str]:
    """Strings of characters from everywhere in Unicode, unassigned ones too."""
    draw = random.Random(0)
    planes = [(1, 0x250), (0x300, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xE000, 0x110000), (32, 33)]
    return ["".join(chr(draw.randrange(*draw.choice(planes))) for _ in range(12)) for _ in range(count)]


def flickr(language: str) -> list[str]:
    return [text for line in FLICKR.read_text(encoding="utf-8").splitlines() for text in json.loads(line)[language]]


def words_of_any_script(text: str) -> str:
    """The caption rule once more, by a regular expression instead of a table."""
    return " ".join(re.findall(r"(?:[^\W_]|')+", unicodedata.normalize("NFKC", text).lower()))


def test_graph_ids_equal_python_ids(tokenizer):
    tf, _ = pytest.importorskip("tensorflow"), pytest.importorskip("tensorflow_text")
    texts = TEXTS + ODD + noise(500)
    encode = tf.function(tokenizer.tf_encode)
    ragged = encode(tf.constant(texts))
    assert ragged.dtype == tf.int32
    assert ragged.to_list() == [tokenizer.encode(text) for text in texts]


@pytest.mark.skipif(not (FLICKR.exists() and ENJA.exists()), reason=f"no flickr8k and enja under {DATA}")
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_graph_ids_equal_python_ids_on_english_chinese_and_japanese(normalization):
    tf, _ = pytest.importorskip("tensorflow"), pytest.importorskip("tensorflow_text")
    texts = flickr("en")[:1000] + flickr("zh")[:1000] + ENJA.read_text(encoding="utf-8").splitlines()[:1000]
    texts += [unicodedata.normalize("NFKD", text).translate(HALF_WIDTH) for text in texts[-500:]]
    tokenizer = Tokenizer.train(texts, 3000, normalization=normalization, character_coverage=0.9995)
    data = tf.data.Dataset.from_tensor_slices(texts).batch(1000).map(tokenizer.tf_encode)
    ids = [row for batch in data for row in batch.to_list()]
    assert ids == [tokenizer.encode(text) for text in texts]
    assert sum(row.count(tokenizer.unk_id) for row in ids) < 0.002 * sum(map(len, ids))


@pytest.mark.skipif(not FLICKR.exists(), reason=f"no flickr8k under {DATA}")
def test_caption_normalisation_equals_the_regular_expression_on_real_captions(captions):
    english, chinese = flickr("en"), flickr("zh")
    assert [captions.normalize(text) for text in english] == [normalize_caption(text) for text in english]
    assert [captions.normalize(text) for text in chinese] == [words_of_any_script(text) for text in chinese]


PLAIN = st.characters(exclude_categories=["Cs", "Cn", "Co", "Cf", "M"], exclude_characters="\0\u2019\u03a3")


@given(text=st.text(PLAIN))
@settings(max_examples=300, deadline=None)
def test_caption_normalisation_equals_the_regular_expression(captions, text):
    lower = unicodedata.normalize("NFKC", text).lower()
    assume(not any(unicodedata.category(c).startswith("M") for c in lower))
    assert captions.normalize(text) == words_of_any_script(text)


@pytest.mark.parametrize("text", ["café", "ÉCOLE", "Việt Nam", "한국어", "が"])
def test_composed_and_decomposed_spellings_are_one(captions, text):
    composed, decomposed = unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text)
    assert composed != decomposed
    assert captions.normalize(decomposed) == captions.normalize(composed) == composed.lower()


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("A dog\u00a0 runs ,\t fast\n", "a dog runs fast"),
        ("❤️ love 👩‍👩‍👧 1️⃣", "love 1"),
        ("don\u2019t", "don't"),
        ("zero\u200bwidth soft\u00adhyphen", "zero width softhyphen"),
        ("snake_case", "snake case"),
        ("!?", ""),
    ],
)
def test_caption_normalisation_of_odd_text(captions, text, normal):
    assert captions.normalize(text) == normal


def unicode_form(normalization: str, text: str) -> str:
    """The Unicode normalisations once more, by `unicodedata` and `split` instead of a table."""
    if normalization == "nfc":
        return unicodedata.normalize("NFC", text)
    text = unicodedata.normalize("NFKC", text)
    if normalization == "nfkc_lower":
        text = unicodedata.normalize("NFKC", "".join(map(str.lower, text)))
    return " ".join(text.replace("\u2581", " ").split())


@pytest.fixture(scope="module", params=["nfc", "nfkc", "nfkc_lower"])
def form(request) -> tuple[str, Tokenizer]:
    return request.param, Tokenizer.train(TEXTS, 400, normalization=request.param, shrink=True)


def test_every_character_gets_its_unicode_form(form):
    name, tokenizer = form
    alphabets = [range(1, 0x3400), range(0x3400, 0xD800, 7), range(0xE000, 0x1F300), range(0x1F300, 0x30000, 7)]
    characters = [chr(code) for code in itertools.chain(*alphabets) if code != 0x2581]
    assert [c for c in characters if tokenizer.normalize(c) != unicode_form(name, c)] == []


def test_every_spelling_of_a_composed_character_gets_its_unicode_form(form):
    name, tokenizer = form
    for code in [*range(0xC0, 0xAC00), *range(0xAC00, 0xD7A4, 11), *range(0xF900, 0x1F000)]:
        base, *marks = unicodedata.normalize("NFD", chr(code))
        if not marks or unicodedata.normalize("NFC", chr(code)) != chr(code):
            continue  # Unicode leaves a few apart in every form
        for order in itertools.permutations(marks):
            for composed in range(len(order) + 1):
                spelling = unicodedata.normalize("NFC", base + "".join(order[:composed])) + "".join(order[composed:])
                if unicodedata.normalize("NFC", spelling) == unicodedata.normalize("NFC", chr(code)):
                    assert tokenizer.normalize(spelling) == unicode_form(name, spelling), ascii(spelling)


def test_half_width_katakana_become_katakana(form):
    name, tokenizer = form
    for code, mark in itertools.product(range(0xFF66, 0xFF9E), ("", "\uff9e", "\uff9f", "\u3099")):
        assert tokenizer.normalize(chr(code) + mark) == unicode_form(name, chr(code) + mark)
    if name != "nfc":
        assert tokenizer.normalize("\uff76\uff9e\uff70\uff84\uff9e") == "ガード"


# A wide form, then what may follow it; other compatibility characters next to what composes are the stated exception.
WRITTEN = st.characters(exclude_categories=["Cs", "M"], exclude_characters="\0\u2581\u03a3\uff9e\uff9f").filter(
    lambda c: not 0x1100 <= ord(unicodedata.normalize("NFKD", c)[0]) < 0x1200 and not 0x3130 <= ord(c) < 0x3190
)


@given(text=st.lists(st.tuples(WRITTEN, st.sampled_from(["NFC", "NFD"])) | st.sampled_from([(c, "NFC") for c in ODD])))
@settings(max_examples=200, deadline=None)
def test_normalised_text_is_what_unicodedata_gives(form, text):
    name, tokenizer = form
    text = "".join(unicodedata.normalize(shape, c) for c, shape in text).replace("\0", "").replace("\u2581", "")
    assert tokenizer.normalize(text) == unicode_form(name, text)


@pytest.mark.skipif(not (FLICKR.exists() and ENJA.exists() and MULTI30K.exists()), reason=f"no texts under {DATA}")
@pytest.mark.parametrize("shape", ["NFC", "NFD", "NFKD"])
def test_normalised_english_german_japanese_is_what_unicodedata_gives(form, shape):
    name, tokenizer = form
    texts = flickr("en")[:2000] + ENJA.read_text(encoding="utf-8").splitlines()[:4000]
    texts += gzip.decompress(MULTI30K.read_bytes()).decode().splitlines()
    texts = [unicodedata.normalize(shape, text) for text in texts]
    assert [tokenizer.normalize(text) for text in texts] == [unicode_form(name, text) for text in texts]


def test_decoding_gives_the_normalised_text_where_nothing_is_unknown(tokenizer):
    for text in TEXTS + ODD + noise(200):
        ids = tokenizer.encode(text)
        if tokenizer.unk_id not in ids:
            assert tokenizer.decode(ids) == tokenizer.normalize(text)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")))
@settings(max_examples=300, deadline=None)
def test_without_normalisation_bytes_keep_every_character_and_blank(exact, text):
    assert exact.decode(exact.encode(text)) == text


def test_no_text_gives_a_special_id_but_unk(tokenizer):
    for text in TEXTS + ODD + noise(200):
        assert not {0, 2, 3} & set(tokenizer.encode(text))


SCENE = "First Citizen:\nSpeak,  speak.\n\n\tALL:\r\nResolved; resolved."


@given(text=st.text(st.sampled_from(SCENE)), start=st.integers(0, 20))
def test_characters_are_one_id_each_and_none_is_lost(text, start):
    tokenizer = Tokenizer.train([SCENE], model_type="char")
    assert tokenizer.vocabulary_size == 4 + len(set(SCENE))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids[start:]) == text[start:]
    assert tokenizer.normalize(text) == text
    assert len(ids) == len(text)


def test_a_line_end_at_the_end_of_a_text_is_a_character_too():
    tokenizer = Tokenizer.train(["ab\n", "\r\n", "c"], model_type="char")
    assert tokenizer.decode(tokenizer.encode("\nab\r\n")) == "\nab\r\n"


def test_a_limit_leaves_out_the_rarest_characters_and_tokens():
    texts = ["a b a b a c"]
    for model_type, blank in (("char", "\u2581"), ("word", "")):
        tokenizer = Tokenizer.train(texts, 6 + len(blank), model_type)
        assert {"a", "b"} == {p.replace("\u2581", "") for p in tokenizer.pieces(range(4, 6 + len(blank)))} - {""}
        assert tokenizer.unk_id in tokenizer.encode("c")
        assert (
            Tokenizer.train(texts, 100, model_type).model_bytes == Tokenizer.train(texts, 100, model_type).model_bytes
        )
        assert Tokenizer.train(texts, 100, model_type).vocabulary_size == 7 + len(blank)


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason=f"no tinyshakespeare under {DATA}")
def test_a_million_characters_go_there_and_back():
    text = SHAKESPEARE.read_bytes().decode()
    tokenizer = Tokenizer.train([text], model_type="char")
    ids = tokenizer.encode(text)
    assert (len(ids), tokenizer.vocabulary_size) == (1_115_394, 65 + 4)
    assert tokenizer.decode(ids) == text


def unsegmented(text: str) -> str:
    """What the manual of subword-nmt does with sed."""
    return re.sub("(@@ )|(@@ ?$)", "", text)


TOKENS = ["brea@@", "king", "@@", "@@@", "@-@", "x@@y", "@", "\u72ac@@", "\u304c", "e\u0301@@"]


@pytest.fixture(scope="module")
def marked() -> Tokenizer:
    return Tokenizer.train([" ".join(TOKENS)], model_type="word", joiner="@@")


@given(tokens=st.lists(st.sampled_from(TOKENS)))
def test_marked_tokens_join_as_sed_joins_them(marked, tokens):
    ids = marked.encode("  ".join(tokens) + " ")
    assert [piece.replace("\u2581", "") for piece in marked.pieces(ids)] == tokens
    assert marked.decode([2, *ids, 3, 4]) == unsegmented(" ".join(tokens))
    words = marked.words([2, *ids, 3, 4])
    assert [word for word, _ in words] == unsegmented(" ".join(tokens)).split()
    places = [place for _, positions in words for place in positions]
    assert places == list(range(1, 1 + len(places)))
    assert set(tokens[len(places) :]) <= {"@@"}  # left out: marks of nothing at the end


def test_a_tab_or_line_end_separates_tokens(marked):
    assert marked.encode("\tbrea@@\tking \r\n") == marked.encode("brea@@ king")


def test_an_unknown_token_is_a_word(marked):
    assert marked.decode(marked.encode("king dog king")) == "king \u2047 king"
    assert marked.decode(marked.encode("dog")) == "\u2047"
    assert marked.words(marked.encode("king dog brea@@ dog")) == [
        ("king", [0]),
        ("\u2047", [1]),
        ("brea\u2047", [2, 3]),
    ]


def test_the_bytes_alone_hold_kind_and_joiner(tokenizer, marked, request):
    assert (tokenizer.model_type, tokenizer.joiner) == (request.node.callspec.params["tokenizer"][1], None)
    again = pickle.loads(pickle.dumps(marked))
    assert (again.model_type, again.joiner) == ("word", "@@")
    plain = sentencepiece.SentencePieceProcessor(model_proto=marked.model_bytes)
    assert plain.decode(marked.encode("brea@@ king @-@")) == again.decode(marked.encode("brea@@ king @-@"))


@pytest.mark.skipif(not SEGMENTED.exists(), reason=f"no multi30k_bpe_en_de under {DATA}")
def test_segmented_text_goes_there_and_back():
    tf, _ = pytest.importorskip("tensorflow"), pytest.importorskip("tensorflow_text")
    lines = {p.name: p.read_text(encoding="utf-8").splitlines() for p in SEGMENTED.glob("*.*") if p.suffix != ".md"}
    train = lines["train.en"] + lines["train.de"]
    tokenizer = Tokenizer(Tokenizer.train(train, model_type="word", joiner="@@").model_bytes)
    assert tokenizer.vocabulary_size == 4 + len({token for line in train for token in line.split()})
    for name, texts in lines.items():
        ids = [tokenizer.encode(text) for text in texts]
        assert tokenizer.tf_encode(tf.constant(texts)).to_list() == ids
        unknown = [tokenizer.unk_id in row for row in ids]
        assert not any(unknown) if "train" in name else sum(unknown) < 0.02 * len(unknown)
        joined = [tokenizer.decode(row) for row, bad in zip(ids, unknown, strict=True) if not bad]
        wanted = [" ".join(text.split()) for text, bad in zip(texts, unknown, strict=True) if not bad]
        assert joined == [unsegmented(text) for text in wanted]


def test_half_a_surrogate_pair_is_encoded_as_the_replacement_character(tokenizer):
    assert tokenizer.encode("a \ud83d dog") == tokenizer.encode("a \ufffd dog")


def test_special_ids_leave_no_text_and_nothing_follows_eos(captions):
    ids = captions.encode("a red dog")
    assert captions.decode([2, *ids, 3, *ids, 0]) == "a red dog"
    assert captions.decode([]) == captions.decode([2, 3, 0, 0]) == ""
    assert captions.pieces([0, 1, 2, 3]) == ["<pad>", "<unk>", "<s>", "</s>"]


def test_any_ids_decode_and_group(tokenizer):
    draw = random.Random(1)
    for _ in range(200):
        ids = [draw.randrange(tokenizer.vocabulary_size) for _ in range(20)]
        assert isinstance(tokenizer.decode(ids), str)
        assert all(word for word, _ in tokenizer.words(ids))


def test_an_id_outside_the_vocabulary_is_refused(captions):
    for bad in (-1, 150):
        with pytest.raises(ValueError, match=f"Token id {bad} is not in this vocabulary: ids are 0 to 149"):
            captions.decode([5, bad])


def test_words_hold_the_text_and_each_piece_once(tokenizer):
    for text in TEXTS + ODD + noise(200):
        ids = tokenizer.encode(text)
        words = tokenizer.words([2, *ids, 3, 0])
        assert "".join("".join(word for word, _ in words).split()) == "".join(tokenizer.decode(ids).split())
        places = [place for _, positions in words for place in positions]
        assert places == list(range(1, 1 + len(places)))  # in order, none twice, without bos
        assert not tokenizer.decode(ids[len(places) :]).strip()  # left out: blanks at the end


def test_words_of_english_are_what_blanks_separate(tokenizer):
    for text in TEXTS[:3]:
        assert [word for word, _ in tokenizer.words(tokenizer.encode(text))] == tokenizer.normalize(text).split()


def test_words_of_chinese_are_its_pieces(captions):
    ids = captions.encode("两只狗在路上打架。")
    pieces = [piece.replace("\u2581", "") for piece in captions.pieces(ids)]
    assert [word for word, _ in captions.words(ids)] == [piece for piece in pieces if piece]


def test_a_mark_never_begins_a_word():
    thai = [("\u0e17", [0]), ("\u0e35", [1]), ("\u0e48", [2]), ("dog", [3])]
    assert group_words(thai) == [("\u0e17\u0e35\u0e48", [0, 1, 2]), ("dog", [3])]


def test_the_same_texts_give_the_same_bytes_in_another_process(captions):
    program = (
        "import sys, json; from mmattn.preprocess.text import Tokenizer; "
        "sys.stdout.buffer.write(Tokenizer.train(json.load(sys.stdin), 150, normalization='caption').model_bytes)"
    )
    process = subprocess.run([sys.executable, "-c", program], input=json.dumps(TEXTS).encode(), capture_output=True)
    assert process.stdout == captions.model_bytes
    assert process.stderr == b""


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_the_error_names_the_sizes_that_fit(model_type):
    with pytest.raises(ValueError, match=r"more than 21 texts can fill; the largest that fits: \d+") as error:
        Tokenizer.train(TEXTS, 5000, model_type)
    largest = int(re.search(r"fits: (\d+)", str(error.value))[1])
    assert Tokenizer.train(TEXTS, largest, model_type).vocabulary_size == largest
    with pytest.raises(ValueError, match="largest that fits"):
        Tokenizer.train(TEXTS, largest + 1, model_type)
    with pytest.raises(ValueError, match=r"is less than the \d+ that") as error:
        Tokenizer.train(TEXTS, 20, model_type)
    least = int(re.search(r"at least (\d+)", str(error.value))[1])
    assert Tokenizer.train(TEXTS, least, model_type).vocabulary_size == least
    with pytest.raises(ValueError, match="is less than"):
        Tokenizer.train(TEXTS, least - 1, model_type)


def test_shrink_takes_what_the_texts_can_fill():
    assert 4 < Tokenizer.train(TEXTS, 5000, shrink=True).vocabulary_size < 5000


def test_a_long_text_is_not_left_out():
    text = " ".join(["short"] * 5000) + " ξ"
    assert 1 not in Tokenizer.train([text], 30, shrink=True).encode("ξ")


@pytest.mark.parametrize(
    ("texts", "options", "error", "words"),
    [
        ([], {}, ValueError, "at least one text"),
        (["", "  "], {}, ValueError, "at least one text"),
        (["?!"], {"normalization": "caption"}, ValueError, "leaves no character of the 1 texts"),
        ("a dog", {}, TypeError, "this is one string"),
        ([None], {}, TypeError, "not NoneType"),
        (TEXTS, {"vocabulary_size": 4}, ValueError, "no room beside the 4"),
        (TEXTS, {"vocabulary_size": None}, ValueError, "needs a vocabulary_size"),
        (TEXTS, {"model_type": "words"}, ValueError, "'words'"),
        (TEXTS, {"normalization": "nfd"}, ValueError, "'nfd'"),
        (TEXTS, {"joiner": "@@"}, ValueError, 'fits model_type="word", not "bpe"'),
        (TEXTS, {"model_type": "word", "joiner": "@ "}, ValueError, "mark without blanks"),
        (TEXTS, {"model_type": "word", "joiner": ""}, ValueError, "mark without blanks"),
        (
            TEXTS,
            {"model_type": "word", "joiner": "@@", "normalization": "caption"},
            ValueError,
            "'caption' makes it ''",
        ),
        (TEXTS, {"model_type": "char", "byte_fallback": True}, ValueError, 'fits model_type "bpe"'),
        (TEXTS, {"character_coverage": 0.5}, ValueError, "0.5"),
    ],
)
def test_training_states_what_is_wrong(texts, options, error, words):
    with pytest.raises(error, match=words):
        Tokenizer.train(texts, **{"vocabulary_size": 100, **options})


def test_damaged_bytes_are_refused(captions, tmp_path):
    whole = captions.model_bytes
    for bad in (b"", b"{}", b"PK\x03\x04" * 50, bytes(99), whole[: len(whole) // 2], whole[:-1], whole[100:]):
        path = tmp_path / "tokenizer.model"
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"tokenizer\.model: .*(SentencePiece model|special ids)"):
            Tokenizer.load(path)


def test_other_special_ids_are_refused(tmp_path):
    prefix = str(tmp_path / "other")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_prefix=prefix, vocab_size=80, minloglevel=2
    )
    with pytest.raises(ValueError, match=r"must be \(0, 1, 2, 3\); this model has \(-1, 0, 1, 2\)"):
        Tokenizer.load(prefix + ".model")


def test_saved_pickled_and_copied_tokenizers_are_equal(captions, tmp_path):
    captions.save(tmp_path / "a.model")
    for other in (Tokenizer.load(tmp_path / "a.model"), pickle.loads(pickle.dumps(captions))):
        assert other.model_bytes == captions.model_bytes
        assert other.encode("Two DOGS") == captions.encode("two dogs")
    assert [path.name for path in tmp_path.iterdir()] == ["a.model"]


def test_a_failed_save_leaves_the_old_file(captions, tmp_path, monkeypatch):
    path = tmp_path / "a.model"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        captions.save(path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.model"]


def test_importing_the_tokenizer_loads_no_tensorflow():
    program = "import sys, mmattn.preprocess.text; sys.exit(any(m.startswith('tensorflow') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize("model_type", ["bpe", "char", "word"])
@pytest.mark.parametrize("normalization", ["none", "nfc", "nfkc", "nfkc_lower", "caption"])
def test_normalization_is_told_from_the_bytes_alone(normalization, model_type):
    texts = ["a dog runs", "two dogs run"] * 3
    size = {} if model_type in ("char", "word") else {"vocabulary_size": 20, "shrink": True}
    made = Tokenizer.train(texts, model_type=model_type, normalization=normalization, **size)
    assert Tokenizer(made.model_bytes).normalization == normalization


def test_rules_for_decoded_text_that_are_no_joiners_are_refused():
    """SentencePiece's code for looking into rules may loop for ever on a stranger's."""
    import sentencepiece

    plain = dict.fromkeys(("add_dummy_prefix", "escape_whitespaces", "remove_extra_whitespaces"), False)
    made = Tokenizer.train(["a b"], model_type="word").model_bytes
    for table in ([("a", "b")], [("@@ ", ""), ("b", "")], [("@@ ", "x")]):
        rules = sentencepiece.SentencePieceNormalizer(norm_map=table, **plain).serialized_normalizer_spec()
        size, length = b"", len(rules)
        while length > 127:
            size, length = size + bytes([length & 127 | 128]), length >> 7
        with pytest.raises(ValueError, match="rules that are not those of a joiner"):
            Tokenizer(made + bytes([5 << 3 | 2]) + size + bytes([length]) + rules)


@pytest.mark.parametrize("joiner", ["@@", "##", "\uffed", "\u65e5\u672c", "x"])
def test_any_joiner_is_read_from_the_bytes(joiner):
    made = Tokenizer.train([f"a{joiner} b c"], model_type="word", joiner=joiner)
    assert Tokenizer(made.model_bytes).joiner == joiner
    assert made.decode(made.encode(f"a{joiner} b c")) == "ab c"


@pytest.mark.parametrize("model_type", ["bpe", "unigram", "word"])
def test_unknown_pieces_are_shown_as_they_stand_in_the_text(model_type):
    size = {} if model_type == "word" else {"vocabulary_size": 30, "shrink": True}
    made = Tokenizer.train(["a dog runs", "two dogs run"] * 3, model_type=model_type, **size)
    text = "a \u732b\u732b runs"
    ids = made.encode(text)
    assert made.unk_id in ids
    assert "\u2047" in "".join(word for word, _ in made.words(ids))
    assert "".join(word for word, _ in made.words(ids, text)) == text.replace(" ", "")
