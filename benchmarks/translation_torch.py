"""torch.nn.Transformer and Hugging Face's MarianMT: the same translation model, each run as it is documented."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import numpy as np

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn
from torch.nn import functional
from translation_job import BOS, EOS, PAD, Job

IGNORED = -100


def _prepare(job: Job) -> None:
    torch.set_num_threads(job.threads)
    torch.manual_seed(job.seed)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _tensors(job: Job) -> tuple[torch.Tensor, ...]:
    """Source, target and labels to train on, and the source to translate."""
    batch = job.batch(job.train_rows)
    labels = np.where(batch.labels == PAD, IGNORED, batch.labels)
    arrays = (batch.source, batch.target, labels, job.batch(job.translate_rows).source)
    return tuple(torch.from_numpy(array.astype("int64")) for array in arrays)


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Transformer(nn.Module):
    """nn.Transformer, pre-norm, between one embedding table for both sides and the output."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embedding = nn.Embedding(job.vocabulary_size, job.hidden_dim)
        nn.init.normal_(self.embedding.weight, std=job.hidden_dim**-0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that pre-norm rules out its nested tensors
            self.body = nn.Transformer(
                job.hidden_dim,
                job.num_heads,
                job.encoder_layers,
                job.decoder_layers,
                job.intermediate_dim,
                job.dropout,
                batch_first=True,
                norm_first=True,
            )
        for layer in (*self.body.encoder.layers, *self.body.decoder.layers):
            layer.dropout.p = 0.0  # inside the position-wise networks, where the others drop nothing
        self.dropout = nn.Dropout(job.dropout)
        places = torch.arange(job.length + 1)[:, None]
        angles = places * torch.exp(torch.arange(0, job.hidden_dim, 2) * (-math.log(10000.0) / job.hidden_dim))
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).reshape(len(places), -1)
        self.register_buffer("positions", table)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(x + self.positions[: ids.shape[1]])

    def encode(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        padding = source == PAD
        return self.body.encoder(self.embed(source), src_key_padding_mask=padding), padding

    def decode(self, target: torch.Tensor, memory: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        return self.body.decoder(
            self.embed(target), memory, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding
        )

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.decode(target, *self.encode(source)), self.embedding.weight)


class Torch:
    """nn.Transformer. It has neither a cache nor a search: each token takes a pass over all tokens so far."""

    def __init__(self, job: Job) -> None:
        _prepare(job)
        self.model, self.length = Transformer(job), job.length
        self.optimizer = _adam(self.model)
        self.source, self.target, self.labels, self.to_translate = _tensors(job)

    def parameters(self) -> int:
        return _count(self.model)

    def train(self, variant: str) -> float:
        logits = self.model.train()(self.source, self.target)
        loss = functional.cross_entropy(logits.flatten(0, 1), self.labels.flatten(), ignore_index=IGNORED)
        return _step(self.optimizer, loss)

    @torch.inference_mode()
    def translate(self, beams: int) -> np.ndarray:
        if beams != 1:
            raise NotImplementedError("torch has no beam search")
        memory, padding = self.model.eval().encode(self.to_translate)
        ids = torch.full((len(memory), 1), BOS)
        for _ in range(self.length):
            last = self.model.decode(ids, memory, padding)[:, -1]
            following = functional.linear(last, self.model.embedding.weight).argmax(-1)
            ids = torch.cat([ids, following[:, None]], dim=1)
        return ids[:, 1:].numpy()

    @torch.inference_mode()
    def logits(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        return self.model.eval()(torch.from_numpy(source).long(), torch.from_numpy(target).long()).numpy()


class Marian:
    """MarianMTModel from a configuration. Its layers are post-norm, as in 2017, so it has no final norms."""

    def __init__(self, job: Job) -> None:
        from transformers import MarianConfig, MarianMTModel

        _prepare(job)
        config = MarianConfig(
            vocab_size=job.vocabulary_size,
            d_model=job.hidden_dim,
            encoder_layers=job.encoder_layers,
            decoder_layers=job.decoder_layers,
            encoder_attention_heads=job.num_heads,
            decoder_attention_heads=job.num_heads,
            encoder_ffn_dim=job.intermediate_dim,
            decoder_ffn_dim=job.intermediate_dim,
            activation_function="relu",
            dropout=job.dropout,
            attention_dropout=job.dropout,
            scale_embedding=True,
            max_position_embeddings=job.length + 1,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            decoder_start_token_id=BOS,
            forced_eos_token_id=None,
        )
        self.model: Any = MarianMTModel(config)
        self.model.generation_config.forced_eos_token_id = None
        self.optimizer, self.length = _adam(self.model), job.length
        self.source, self.target, self.labels, self.to_translate = _tensors(job)

    def parameters(self) -> int:
        return _count(self.model)

    def train(self, variant: str) -> float:
        made = self.model.train()(
            input_ids=self.source,
            attention_mask=(self.source != PAD).long(),
            decoder_input_ids=self.target,
            labels=self.labels,
        )
        return _step(self.optimizer, made.loss)

    @torch.inference_mode()
    def translate(self, beams: int) -> np.ndarray:
        ids = self.model.eval().generate(
            input_ids=self.to_translate,
            attention_mask=(self.to_translate != PAD).long(),
            min_new_tokens=self.length,
            max_new_tokens=self.length,
            num_beams=beams,
            do_sample=False,
        )
        return ids[:, 1:].numpy()

    @torch.inference_mode()
    def logits(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        ids, target_ids = (torch.from_numpy(source).long(), torch.from_numpy(target).long())
        mask = (ids != PAD).long()
        return self.model.eval()(input_ids=ids, attention_mask=mask, decoder_input_ids=target_ids).logits.numpy()
