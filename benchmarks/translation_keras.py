"""mmattn and KerasHub: the same translation model from the layers of each, on Keras' TensorFlow backend."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from translation_job import BOS, EOS, PAD, UNK, Job

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from keras import ops


def _prepare(job: Job) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(job.threads)
    tf.config.threading.set_inter_op_parallelism_threads(job.threads)
    keras.utils.set_random_seed(job.seed)


def _adam() -> Any:
    return keras.optimizers.Adam(1e-4, beta_2=0.98, epsilon=1e-9)


def _loss(model: Any, inputs: dict[str, np.ndarray], labels: np.ndarray, weights: np.ndarray) -> float:
    """One step of Keras' compiled training function."""
    return float(np.ravel(model.train_on_batch(inputs, labels, weights))[0])


class Mmattn:
    """mmattn's EncoderDecoder. Variant "padded" gives logits at all places, as the others do; "packed" is what its
    training runs do: logits at the real labels alone."""

    def __init__(self, job: Job) -> None:
        from mmattn.decoders import TransformerDecoder
        from mmattn.decoding import Generator
        from mmattn.encoders.text import TextEncoder
        from mmattn.model import EncoderDecoder
        from mmattn.training.losses import MaskedCrossEntropy

        _prepare(job)
        sizes: dict[str, Any] = {
            "vocabulary_size": job.vocabulary_size,
            "hidden_dim": job.hidden_dim,
            "num_heads": job.num_heads,
            "intermediate_dim": job.intermediate_dim,
            "dropout": job.dropout,
            "attention_dropout": job.dropout,
        }
        encoder = TextEncoder(num_layers=job.encoder_layers, **sizes)
        decoder = TransformerDecoder(num_layers=job.decoder_layers, output_bias=False, **sizes)
        self.model: Any = EncoderDecoder(encoder, decoder, share_embeddings=True)
        self.model.build({"source_ids": (None, None), "target_ids": (None, None)})
        self.model.compile(optimizer=_adam(), loss=MaskedCrossEntropy(), jit_compile=job.xla)
        self.generate = Generator(
            self.model.start, self.model.step, bos_id=BOS, eos_id=EOS, pad_id=PAD, unk_id=UNK, max_positions=math.inf
        )
        self.length = job.length
        self.source = job.batch(job.translate_rows).source
        batch = job.batch(job.train_rows)
        inputs = {"source_ids": batch.source, "target_ids": batch.target}
        places = np.flatnonzero(batch.labels != PAD).astype("int32")
        self.batches = {
            "padded": (inputs, batch.labels, (batch.labels != PAD).astype("float32")),
            "packed": (
                {**inputs, "label_places": places},
                batch.labels.ravel()[places],
                np.ones(len(places), "float32"),
            ),
        }

    def parameters(self) -> int:
        return int(sum(math.prod(v.shape) for v in self.model.trainable_variables))

    def train(self, variant: str) -> float:
        return _loss(self.model, *self.batches[variant])

    def translate(self, beams: int) -> np.ndarray:
        search: dict[str, Any] = {"method": "greedy"} if beams == 1 else {"method": "beam", "num_beams": beams}
        options = {"max_length": self.length, "min_length": self.length - 1, "compiled": True}
        return self.generate({"source_ids": self.source}, **search, **options).ids[:, 0]

    def logits(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        return ops.convert_to_numpy(self.model({"source_ids": source, "target_ids": target}, training=False))


class KerasHub:
    """KerasHub's Transformer layers, its tied embedding and its sampler, with the caches that its layers offer."""

    def __init__(self, job: Job) -> None:
        from keras_hub.samplers import BeamSampler, GreedySampler

        _prepare(job)
        self.model: Any = keras_hub_model(job)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
        self.model.compile(optimizer=_adam(), loss=loss, jit_compile=job.xla)
        self.samplers = {1: GreedySampler(), 5: BeamSampler(num_beams=5)}
        self.programs: dict[int, Any] = {}
        self.source = job.batch(job.translate_rows).source
        batch = job.batch(job.train_rows)
        inputs = {"source_ids": batch.source, "target_ids": batch.target}
        self.batch = (inputs, batch.labels, (batch.labels != PAD).astype("float32"))
        self.model(inputs)

    def parameters(self) -> int:
        return int(sum(math.prod(v.shape) for v in self.model.trainable_variables))

    def train(self, variant: str) -> float:
        return _loss(self.model, *self.batch)

    def translate(self, beams: int) -> np.ndarray:
        if beams not in self.programs:  # as KerasHub's own models compile their generate_step
            sampler = self.samplers[beams]
            self.programs[beams] = tf.function(
                lambda source: self.model.generate(source, sampler, beams), jit_compile=True
            )
        return self.programs[beams](tf.constant(self.source)).numpy()

    def logits(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        return ops.convert_to_numpy(self.model({"source_ids": source, "target_ids": target}, training=False))


def keras_hub_model(job: Job) -> Any:
    """A Keras model of KerasHub's layers, pre-norm, one table for both sides and the output."""
    from keras_hub.layers import SinePositionEncoding, TransformerDecoder, TransformerEncoder

    class Translator(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            layer = {"num_heads": job.num_heads, "dropout": job.dropout, "normalize_first": True}
            self.embedding = keras.layers.ReversibleEmbedding(
                job.vocabulary_size,
                job.hidden_dim,
                embeddings_initializer=keras.initializers.RandomNormal(stddev=job.hidden_dim**-0.5),
            )
            self.positions = SinePositionEncoding()
            self.dropout = keras.layers.Dropout(job.dropout)
            self.encoders = [TransformerEncoder(job.intermediate_dim, **layer) for _ in range(job.encoder_layers)]
            self.decoders = [TransformerDecoder(job.intermediate_dim, **layer) for _ in range(job.decoder_layers)]
            self.norms = [keras.layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]

        def embed(self, ids: Any, start: Any = 0, training: bool = False) -> Any:
            x = self.embedding(ids) * job.hidden_dim**0.5
            return self.dropout(x + self.positions(x, start_index=start), training=training)

        def encode(self, source: Any, training: bool = False) -> tuple[Any, Any]:
            mask = ops.not_equal(source, PAD)
            x = self.embed(source, training=training)
            for block in self.encoders:
                x = block(x, padding_mask=mask, training=training)
            return self.norms[0](x), mask

        def call(self, inputs: Any, training: bool = False) -> Any:
            memory, mask = self.encode(inputs["source_ids"], training)
            x = self.embed(inputs["target_ids"], training=training)
            for block in self.decoders:
                x = block(x, memory, encoder_padding_mask=mask, training=training)
            return self.embedding(self.norms[1](x), reverse=True)

        def cached(self, ids: Any, index: Any, own: Any, memory: Any, mask: Any, cross: Any, fill: Any) -> Any:
            """One token through the decoder. `fill`: 0 to compute the caches of the memory, None to use them."""
            x, own_caches, cross_caches = self.embed(ids, index), [], []
            for block, own_cache, cross_cache in zip(self.decoders, own, cross, strict=True):
                x, own_cache, cross_cache = block(
                    x,
                    memory,
                    encoder_padding_mask=mask,
                    self_attention_cache=own_cache,
                    self_attention_cache_update_index=index,
                    cross_attention_cache=cross_cache,
                    cross_attention_cache_update_index=fill,
                )
                own_caches.append(own_cache)
                cross_caches.append(cross_cache)
            return (self.embedding(self.norms[1](x), reverse=True)[:, 0], own_caches, cross_caches)

        def generate(self, source: Any, sampler: Any, beams: int) -> Any:
            """`length` tokens for each row, by the sampler. Only what changes in the loop is in its cache."""
            rows, head = (source.shape[0], (job.num_heads, job.hidden_dim // job.num_heads))
            memory, mask = self.encode(source)
            own = [ops.zeros((rows, 2, job.length + 1, *head)) for _ in self.decoders]
            cross = [ops.zeros((rows, 2, source.shape[1], *head)) for _ in self.decoders]
            prompt = ops.concatenate([ops.full((rows, 1), BOS, "int32"), ops.zeros((rows, job.length), "int32")], 1)
            _, own, cross = self.cached(prompt[:, :1], 0, own, memory, mask, cross, fill=0)
            memory, mask, *cross = (ops.repeat(array, beams, axis=0) for array in (memory, mask, *cross))

            def following(prompt: Any, cache: Any, index: Any) -> Any:
                ids = ops.slice(prompt, [0, index - 1], [rows * beams, 1])
                logits, cache, _ = self.cached(ids, index - 1, cache, memory, mask, cross, fill=None)
                return logits, None, cache

            return sampler(following, prompt, cache=own, index=1, model=self)[:, 1:]

    return Translator()
