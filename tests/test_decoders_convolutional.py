"""The convolutional decoder against loops from the paper; step equals call; sources, saving, precision, generation."""

from __future__ import annotations

import math

import keras
import numpy as np
import pytest
from arrays import FLOAT, JAX, MODES, TOLERANCE, TORCH, WIDE, assert_close, assert_equal, numbers
from convolutions import convolved, decoded, encoded, randomised
from keras import ops
from tiny_text import GERMAN, JOINT

from mmattn import Translator, backend
from mmattn.bundle import save_bundle
from mmattn.decoders import ConvolutionalDecoder
from mmattn.decoding import Generator
from mmattn.encoders import ConvolutionalEncoder, TextEncoder
from mmattn.encoders.image import VisionTransformer
from mmattn.layers import MultiStepAttention
from mmattn.model import EncoderDecoder, LanguageModel

V, D, F = 20, 10, 6
SIZES = {"hidden_dim": D, "num_layers": 2, "embedding_dim": F}
SOURCE = np.array([[7, 9, 5, 3, 0, 0], [5, 4, 8, 6, 7, 3]], "int32")
TARGET = np.array([[2, 5, 6, 7, 9], [2, 8, 4, 0, 0]], "int32")
MASK = SOURCE != 0
MEMORY = np.random.default_rng(4).normal(size=(2, 6, 2 * F))
KINDS = {
    "two layers": {},
    "learned": {"positions": "learned", "max_length": 9, "output_bias": False},
    "wide kernel": {"kernel_size": 4, "num_layers": 1, "positions": "none"},
    "one tap": {"kernel_size": 1},
    "another memory": {"source_embeddings": False},
    "language model": {"cross_attention": False},
}
kinds = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def made(dtype="float32", **options):
    decoder = ConvolutionalDecoder(V, **{**SIZES, **options}, dtype=dtype)
    decoder.build((None, None), None if options.get("cross_attention") is False else (None, None, 2 * F))
    return randomised(decoder)


def source(decoder, dtype="float32"):
    """memory and mask as the decoder takes them."""
    if not decoder.has_cross_attention:
        return None, None
    return ops.convert_to_tensor(MEMORY.astype(dtype)), ops.convert_to_tensor(MASK)


@kinds
def test_the_whole_decoder_is_the_papers(options):
    decoder = made(FLOAT, **options)
    memory, mask = source(decoder, FLOAT)
    seeing = decoder.has_cross_attention
    logits, _, *scores = decoder(TARGET, memory, memory_mask=mask, return_attention_scores=seeing)
    narrow = made("float32", **options)(TARGET, *source(decoder))[0]
    for row, length in ((0, 4), (1, 6)):
        if not seeing:
            expected, weights = decoded(decoder, TARGET[row])
        elif decoder.source_embeddings:
            expected, weights = decoded(decoder, TARGET[row], MEMORY[row, :length, :F], MEMORY[row, :length, F:])
        else:  # keys z and values z: as if e were such that (z + e) sqrt(1/2) = z
            z = convolved(decoder.memory_map, MEMORY[row, :length])
            expected, weights = decoded(decoder, TARGET[row], z, z * (math.sqrt(2.0) - 1.0))
        assert_close(logits[row], expected, atol=10 * TOLERANCE)
        assert_close(narrow[row], expected, atol=1e-4)
        if seeing:
            assert tuple(scores[0].shape) == (2, decoder.num_layers, 1, 5, 6)
            assert_close(scores[0][row, :, 0, :, :length], weights, atol=TOLERANCE)
            assert not np.any(numbers(scores[0])[row, :, :, :, length:])


def test_encoder_and_decoder_together_are_the_papers():
    model = translator(FLOAT)
    logits = model({"source_ids": SOURCE, "target_ids": TARGET})
    for row, length in ((0, 4), (1, 6)):
        z, e = encoded(model.encoder, SOURCE[row, :length])
        assert_close(logits[row], decoded(model.decoder, TARGET[row], z, e)[0], atol=10 * TOLERANCE)


def translator(dtype="float32", **options):
    sizes = {**SIZES, **options}
    encoder, decoder = (part(V, **sizes, dtype=dtype) for part in (ConvolutionalEncoder, ConvolutionalDecoder))
    model = EncoderDecoder(encoder, decoder, share_embeddings=True, dtype=dtype)
    model.build({"source_ids": (None, None), "target_ids": (None, None)})
    return randomised(model)


@kinds
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), WIDE])
def test_step_equals_call(options, dtype, tolerance):
    decoder = made(dtype, **options)
    memory, mask = source(decoder, dtype)
    whole = numbers(decoder(TARGET, memory, memory_mask=mask)[0])
    context, state = decoder.start(memory, mask, 5, batch_size=2)
    assert [tuple(window.shape) for window in state] == [(2, decoder.kernel_size - 1, D)] * decoder.num_layers
    for t in range(5):
        logits, state = decoder.step(ops.convert_to_tensor(TARGET[:, t]), t, context, state)
        assert_close(logits, whole[:, t], atol=tolerance * max(1.0, np.abs(whole).max()))


@kinds
def test_the_future_never_reaches_the_past(options):
    decoder = made(**options)
    changed = TARGET.copy()
    changed[:, 3:] = 11
    one, two = (numbers(decoder(ids, *source(decoder))[0]) for ids in (TARGET, changed))
    assert_close(one[:, :3], two[:, :3], atol=1e-6)
    assert np.abs(one[:, 3:] - two[:, 3:]).max() > 1e-3


@pytest.mark.parametrize("options", [{}, {"source_embeddings": False}])
@pytest.mark.parametrize("wrong", [50.0, np.nan])
def test_padding_of_the_memory_never_leaks_into_logits_or_gradients(options, wrong):
    decoder = made(**options)
    results = []
    for fill in (0.0, wrong):
        memory = np.where(MASK[..., None], MEMORY, fill).astype("float32")
        variables = decoder.trainable_variables

        def loss(memory):
            return ops.sum(ops.square(decoder(TARGET, memory, memory_mask=MASK)[0]))

        slopes = [numbers(slope) for slope in backend.gradients(loss, [memory], variables)]
        context, state = decoder.start(memory, MASK, 3)
        step = numbers(decoder.step(ops.convert_to_tensor(TARGET[:, 0]), 0, context, state)[0])
        results.append([numbers(decoder(TARGET, memory, memory_mask=MASK)[0]), step, *slopes])
    for one, other in zip(*results, strict=True):
        assert np.isfinite(one).all()
        assert_close(one, other, rtol=1e-5, atol=1e-5 * np.abs(one).max())
    assert not np.any(results[1][2][~MASK])
    short = decoder(TARGET[:1], MEMORY[:1, :4].astype("float32"))[0]
    assert_close(results[1][0][:1], short, atol=1e-5)


def test_a_source_without_a_real_place_counts_as_nothing():
    decoder = made()
    mask = np.array([[False] * 6, [True] * 6])
    logits, _, scores = decoder(TARGET, MEMORY.astype("float32"), memory_mask=mask, return_attention_scores=True)
    assert not np.any(numbers(scores)[0]) and np.isfinite(numbers(logits)).all()
    slopes = backend.gradients(
        lambda memory: ops.sum(decoder(TARGET, memory, memory_mask=mask)[0]), [MEMORY.astype("float32")]
    )
    assert not np.any(numbers(slopes[0])[0]) and np.isfinite(numbers(slopes[0])).all()


def test_logits_at_places_are_those_of_the_whole():
    model = translator()
    inputs = {"source_ids": SOURCE, "target_ids": TARGET}
    whole, places = numbers(model(inputs)), np.array([0, 1, 4, 5, 7])
    assert_close(model({**inputs, "label_places": places}), whole.reshape(-1, V)[places], atol=1e-5)


def test_several_targets_of_a_source_equal_each_alone():
    model = translator()
    several = np.stack([TARGET, TARGET[::-1]], axis=1)
    logits = model({"source_ids": SOURCE, "target_ids": several})
    for n in range(2):
        assert_close(logits[:, n], model({"source_ids": SOURCE, "target_ids": several[:, n]}), atol=1e-5)


@pytest.mark.parametrize("encoder", ["words", "patches"])
def test_memories_of_other_encoders_are_taken(encoder):
    if encoder == "words":
        part, inputs = TextEncoder(V, 8, num_layers=1, num_heads=2), {"source_ids": SOURCE}
        shapes = {"source_ids": (None, None)}
    else:
        part = VisionTransformer((16, 24), patch_size=8, hidden_dim=8, num_layers=1, num_heads=2)
        pixels = np.random.default_rng(0).integers(0, 256, (2, 16, 24, 3)).astype("uint8")
        inputs, shapes = {"pixels": pixels}, {"pixels": (None, 16, 24, 3)}
    model = EncoderDecoder(part, ConvolutionalDecoder(V, **SIZES, source_embeddings=False))
    model.build({**shapes, "target_ids": (None, None)})
    whole = numbers(model({**inputs, "target_ids": TARGET}))
    context, state = model.start(inputs, 5)
    for t in range(5):
        step, state = model.step(ops.convert_to_tensor(TARGET[:, t]), t, context, state)
        assert_close(step, whole[:, t], atol=1e-5)
    assert_close(numbers(model.attention({**inputs, "target_ids": TARGET})).sum(-1), 1.0, atol=1e-5)


def test_activations_keep_their_variance_through_layers_and_attentions():
    """Section 3.4, at the start of training: within 25 % through 6 layers of convolution and attention."""
    rng = np.random.default_rng(9)
    kept = []
    for _ in range(3):
        decoder = ConvolutionalDecoder(500, 96, num_layers=6, positions="learned", max_length=60)
        memory = rng.normal(scale=0.1 * math.sqrt(2), size=(4, 20, 2 * 96)).astype("float32")
        ids = rng.integers(4, 500, size=(4, 60))
        decoder(ids, memory)
        g = decoder.position_embedding(decoder.token_embedding(ids))
        first = x = decoder.input_map(g)
        context = decoder._context(memory, None)
        for block, attention in zip(decoder.blocks, decoder.attentions, strict=True):
            x, _ = attention.attend(block(x), g, context)
        kept.append(np.var(numbers(x)[:, 12:]) / np.var(numbers(first)))
    assert 0.75 < np.mean(kept) < 1.25


@kinds
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_symbolic_call_gives_the_shapes_and_types_of_a_real_one(options, dtype):
    decoder = made(dtype, **options)
    memory, mask = source(decoder)
    scores = decoder.has_cross_attention
    symbols = (keras.Input((6, 2 * F)), keras.Input((6,), dtype="bool")) if scores else (None, None)
    real = decoder(TARGET, memory, memory_mask=mask, return_attention_scores=scores)
    symbolic = decoder(
        keras.Input((5,), dtype="int32"), symbols[0], memory_mask=symbols[1], return_attention_scores=scores
    )
    assert len(real) == len(symbolic) and real[1] == symbolic[1] == ()
    for a, b in zip(symbolic[::2], real[::2], strict=True):
        assert a.shape[1:] == tuple(b.shape)[1:] and a.dtype == keras.backend.standardize_dtype(b.dtype)
    assert keras.backend.standardize_dtype(real[0].dtype) == "float32"


@pytest.mark.parametrize("options", [KINDS["two layers"], KINDS["another memory"]])
def test_the_mask_that_keras_has_attached_counts_in_steps_as_in_a_call(options):
    decoder = made(**options)
    memory, mask = source(decoder)
    expected = numbers(decoder(TARGET, memory, memory_mask=mask)[0])
    memory._keras_mask = mask
    assert_close(decoder(TARGET, memory)[0], expected, atol=1e-5)
    context, state = decoder.start(memory, None, 5)
    for t in range(5):
        logits, state = decoder.step(TARGET[:, t], t, context, state)
        assert_close(logits, expected[:, t], atol=1e-5)


def test_a_call_masks_the_source_once(monkeypatch):
    decoder, started = made(num_layers=3), []
    start = MultiStepAttention.start
    monkeypatch.setattr(MultiStepAttention, "start", lambda self, *args: started.append(1) or start(self, *args))
    memory, mask = source(decoder)
    decoder(TARGET, memory, memory_mask=mask)
    assert len(started) == 1


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_is_near_and_steps_as_it_calls(policy):
    decoder, exact = made(policy), numbers(made()(TARGET, *source(made()))[0])
    memory, mask = source(decoder)
    whole = numbers(decoder(TARGET, memory, memory_mask=mask)[0])
    assert_close(whole, exact, atol=0.08 * np.abs(exact).max())
    context, state = decoder.start(memory, mask, 5)
    for t in range(5):
        kept = [keras.backend.standardize_dtype(window.dtype) for window in state]
        logits, state = decoder.step(ops.convert_to_tensor(TARGET[:, t]), t, context, state)
        assert_close(logits, whole[:, t], atol=0.08 * np.abs(exact).max())
        assert kept == [keras.backend.standardize_dtype(window.dtype) for window in state]


@pytest.mark.skipif(TORCH, reason="torch has no compiled programs: mmattn.backend.compile gives the function itself")
@pytest.mark.parametrize("mode", MODES[1:] or MODES)
def test_compiled_equals_eager(mode):
    model = translator()

    def loss(source_ids, target_ids):
        return ops.sum(ops.square(model({"source_ids": source_ids, "target_ids": target_ids})))

    def run(source_ids, target_ids):
        inputs = {"source_ids": source_ids, "target_ids": target_ids}
        table = model.decoder.token_embedding.embeddings
        slopes = backend.gradients(lambda: loss(source_ids, target_ids), [], [table]) if mode != "jit" else []
        return model(inputs), slopes

    ids = [ops.convert_to_tensor(x) for x in (SOURCE, TARGET)]
    eager = keras.tree.map_structure(numbers, run(*ids))
    found = backend.compile(run, jit=mode == "xla", variables_of=model)(*ids)
    keras.tree.map_structure(lambda a, b: assert_close(a, b, rtol=1e-4, atol=1e-4), found, eager)


@pytest.mark.parametrize("name", ["greedy", "beam"])
def test_generation_says_what_calls_say(name):
    model = translator()
    generate = Generator(model.start, model.step, bos_id=2, eos_id=3, max_positions=12)
    options = {"greedy": {}, "beam": {"num_beams": 3}}[name]
    compiled = not TORCH
    found = generate({"source_ids": SOURCE}, name, max_length=7, compiled=compiled, **options)
    eager = generate({"source_ids": SOURCE}, name, max_length=7, compiled=False, **options)
    assert_equal(found.ids, eager.ids)
    ids = np.concatenate([np.full((2, 1), 2), found.ids[:, 0, :-1]], axis=1)
    logits = numbers(ops.log_softmax(model({"source_ids": SOURCE, "target_ids": ids}), axis=-1))
    expected = np.take_along_axis(logits, found.ids[:, 0, :, None], axis=-1)[..., 0]
    real = np.arange(7) < found.lengths
    assert_close(found.token_log_probs[:, 0][real], expected[real], atol=1e-4)


@kinds
def test_saved_and_loaded_it_gives_the_same(options, tmp_path):
    decoder = ConvolutionalDecoder(V, **{**SIZES, **options}, dropout=0.1)
    if not decoder.has_cross_attention:
        model, inputs, shapes = LanguageModel(decoder), {"target_ids": TARGET}, {"target_ids": (None, None)}
    else:
        model = EncoderDecoder(ConvolutionalEncoder(V, **SIZES), decoder)
        inputs = {"source_ids": SOURCE, "target_ids": TARGET}
        shapes = {"source_ids": (None, None), "target_ids": (None, None)}
    model.build(shapes)
    randomised(model)
    before = numbers(model(inputs))
    model.save(tmp_path / "m.keras")
    assert_equal(before, keras.models.load_model(tmp_path / "m.keras")(inputs))
    twin = type(model).from_config(model.get_config())
    twin.build(shapes)
    twin.set_weights(model.get_weights())
    assert_equal(before, twin(inputs))
    assert twin.decoder.get_config() == decoder.get_config()
    assert len({v.path for v in model.weights}) == len(model.weights)


def test_a_bundle_translates_as_the_model_that_was_saved(tmp_path):
    sizes = {"vocabulary_size": JOINT.vocabulary_size, **SIZES, "positions": "learned", "max_length": 24}
    model = EncoderDecoder(ConvolutionalEncoder(**sizes), ConvolutionalDecoder(**sizes), share_embeddings=True)
    model.build({"source_ids": (None, None), "target_ids": (None, None)})
    randomised(model)
    card = {"source_language": "German", "target_language": "English"}
    save_bundle(tmp_path / "b", model, JOINT, card=card, weights_dtype="float32")
    settings = {"max_length": 6, "compiled": False, "num_beams": 2}
    before = Translator(model, JOINT).translate(GERMAN, **settings)
    after = Translator.load(tmp_path / "b").translate(GERMAN, **settings)
    assert [a.ids for a in after] == [b.ids for b in before]
    assert [a.score for a in after] == pytest.approx([b.score for b in before], abs=1e-5)


def test_dropout_is_on_in_training_alone_and_repeats_with_its_seed():
    def run(seed, training):
        decoder = made(dropout=0.5, seed=seed)
        return numbers(decoder(TARGET, *source(decoder), training=training)[0])

    assert_equal(run(1, True), run(1, True))
    assert np.abs(run(1, True) - run(2, True)).max() > 1e-3
    assert_equal(run(1, False), run(2, False))


def test_no_two_dropouts_share_their_seed():
    sizes = {**SIZES, "dropout": 0.3, "seed": 1}
    model = EncoderDecoder(ConvolutionalEncoder(V, **sizes), ConvolutionalDecoder(V, **sizes))
    model.build({"source_ids": (None, None), "target_ids": (None, None)})
    seeds = [part.seed for part in model._flatten_layers() if isinstance(part, keras.layers.Dropout)]
    assert len(seeds) == len(set(seeds)) == 1 + 2 + 2 + 2


def test_it_learns_to_copy_what_it_reads():
    keras.utils.set_random_seed(1)
    sizes = {"hidden_dim": 32, "num_layers": 2, "positions": "learned", "max_length": 8}
    model = EncoderDecoder(ConvolutionalEncoder(V, **sizes), ConvolutionalDecoder(V, **sizes), share_embeddings=True)
    model.build({"source_ids": (None, 5), "target_ids": (None, 5)})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.005), loss, jit_compile=JAX)
    words = np.random.default_rng(5).integers(4, V, (320, 5))
    targets = np.concatenate([np.full((320, 1), 2), words[:, :-1]], axis=1)
    model.fit({"source_ids": words[:256], "target_ids": targets[:256]}, words[:256], 32, epochs=24, verbose=0)
    predicted = numbers(model({"source_ids": words[256:], "target_ids": targets[256:]})).argmax(-1)
    assert np.mean(predicted == words[256:]) > 0.9


def language_model():
    return made(cross_attention=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: made(num_layers=0), "num_layers=0"),
        (lambda: made(kernel_size=0), "kernel_size=0"),
        (lambda: made(embedding_dim=0), "embedding_dim=0"),
        (lambda: made(dropout=-0.1), "-0.1"),
        (lambda: made(positions="alibi"), "one of none, sinusoidal, learned"),
        (lambda: made(positions="learned"), "needs max_length"),
        (lambda: made(positions="learned", max_length=4)(TARGET, MEMORY), "knows 4 positions; the sequence has 5"),
        (lambda: made(positions="learned", max_length=4).start(MEMORY, None, 5), "knows 4 positions"),
        (lambda: made()(TARGET, MEMORY[..., :F]), f"side by side, {2 * F} in all.*Received {F}"),
        (lambda: made().start(MEMORY[..., :F], None, 3), "source_embeddings=False takes any memory"),
        (lambda: made()(TARGET), "needs a memory"),
        (lambda: made().start(None, None, 3), "needs a memory"),
        (lambda: language_model()(TARGET, MEMORY), "takes no memory"),
        (lambda: language_model().start(None, None, 5), "batch_size"),
        (lambda: language_model()(TARGET, return_attention_scores=True), "no cross-attention"),
        (lambda: made()(TARGET, MEMORY, memory_mask=MASK[:, :4]), r"memory_mask has the shape \(B, 6\)"),
    ],
)
def test_what_cannot_work_is_refused_in_words(make, message):
    with pytest.raises(ValueError, match=message):
        make()
