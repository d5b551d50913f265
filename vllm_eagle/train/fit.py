"""Fit a head to captured features, unrolled over its own outputs: recipes `eagle1` and `eagle3`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW

from vllm_eagle.errors import EagleError
from vllm_eagle.heads import AnyHead, HeadConfig
from vllm_eagle.heads.flags import NORM_FLAGS
from vllm_eagle.train import optimizers
from vllm_eagle.train.batches import PackedBatch, Sampler, Share, split
from vllm_eagle.train.curves import draw, open_board
from vllm_eagle.train.evaluate import chain_acceptance
from vllm_eagle.train.features import Example
from vllm_eagle.train.objective import Objective
from vllm_eagle.train.processes import PRECISIONS, Team
from vllm_eagle.train.rollout import rollout, uniform_noise
from vllm_eagle.train.state import Journal, Record, load_state, mean_record, save_state
from vllm_eagle.train.trainable import TrainableHead, trainable
from vllm_eagle.train.words import Words

_SAME = (
    *("kind", "num_layers", "intermediate_size", "aux_layers", "fusion_bias", "qkv_bias", "o_bias", "layernorms"),
    *("target_hidden_size", "own_embedding", *NORM_FLAGS),
)
"""What a head must have in common with the one that continues it."""
_START_ROUNDS = 200_000  # 170 for each of the 1,152 inputs of a 576-wide EAGLE-1 head: its linear start overfits with 35


@dataclass(frozen=True)
class FitConfig:
    """Say how long and how to train."""

    steps: int
    batch_rounds: int = 1024
    accumulate: int = 1
    depths: int = 4
    width: int = 10
    decay: float = 0.8
    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.1
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup: int = 100
    clip: float = 0.5
    held_out_percent: int = 3
    save_every: int = 200
    judge_every: int = 200
    seed: int = 0
    precision: str = "float32"

    def __post_init__(self) -> None:
        if min(self.steps, self.depths, self.batch_rounds, self.width, self.accumulate) < 1:
            raise EagleError("steps, depths, batch_rounds, width and accumulate must be 1 or more")
        if self.precision not in PRECISIONS:
            raise EagleError(f"precision={self.precision!r}: want {' or '.join(PRECISIONS)}")
        if self.warmup >= self.steps:
            raise EagleError(f"warmup={self.warmup} leaves nothing of steps={self.steps}; lower warmup")

    @property
    def objective(self) -> Objective:
        """Return the loss these settings ask for."""
        return Objective(self.feature_weight, self.token_weight, self.decay)


@dataclass
class Fit:
    """Train one head over the words of each batch and judge it over `words`; `run` continues from the state in `folder`.

    `batch_words` gives the words of a batch from a seed. `export` is called with every saved state, so that a fit that is
    stopped early leaves a head behind. Of a team, process 0 judges and writes; the others only compute.
    """

    config: FitConfig
    head_config: HeadConfig
    words: Words
    batch_words: Callable[[PackedBatch, int], Words]
    examples: Sequence[Example]
    folder: Path
    export: Callable[[AnyHead], None]
    team: Team
    start: AnyHead | None = None

    def __post_init__(self) -> None:
        if self.start is None:
            return
        for name in _SAME:
            theirs, ours = getattr(self.start.config, name), getattr(self.head_config, name)
            grows = name == "num_layers" and theirs < ours  # layers added start as the identity
            if theirs != ours and not grows:
                raise EagleError(f"--start is a head with {name} {theirs}, this fit trains one with {ours}; it cannot continue")

    def run(self) -> None:
        """Train to the last step; the state is saved and the head exported."""
        config = self.config
        train, held = split(self.examples, config.held_out_percent)
        if not train:
            raise EagleError("no example left to train on; capture more answers or lower held_out_percent")
        sampler = Sampler(train, config.batch_rounds, config.seed)
        head = self._new_head(sampler)
        optimizer = optimizers.build(head, config.learning_rate, config.weight_decay)
        done = load_state(self.folder, head, optimizer, self._identity())
        shares = sampler.shares(done, config.accumulate, self.team.number, self.team.size)
        journal = Journal(self.folder, open_board(self.folder)) if self.team.leads else None
        if journal and held and not done:
            journal.note({"step": 0, "held_out": chain_acceptance(head, held, self.words).rounded()})
        for step in range(done, config.steps):
            record = self._step(step, head, optimizer, next(shares))
            if journal:
                journal.record(step, record)
                self._look_after(step + 1, head, optimizer, held, journal)
        if journal:
            journal.close()
            draw(self.folder)
        self.team.wait()

    def _look_after(self, step: int, head: TrainableHead, optimizer: AdamW, held: Sequence[Example], journal: Journal) -> None:
        """Judge, save and export when it is time; at the last step it is."""
        last = step == self.config.steps
        if held and (last or step % self.config.judge_every == 0):
            journal.note({"step": step, "held_out": chain_acceptance(head, held, self.words).rounded()})
        if last or step % self.config.save_every == 0:
            save_state(self.folder, head, optimizer, step, self._identity())
            self.export(head.exported())

    def _identity(self) -> str:
        tokens = sum(len(example.tokens) for example in self.examples)
        head, aux = self.head_config, ""
        if head.is_eagle3:
            aux = f", states of layers {head.aux_layers}, {head.draft_vocab_size} tokens to draft from"
        config = replace(self.config, accumulate=self.config.accumulate * self.team.size)  # the same steps, however dealt out
        return f"{config} on {len(self.examples)} sequences, {tokens} tokens{aux}"

    def _new_head(self, sampler: Sampler) -> TrainableHead:
        torch.manual_seed(self.config.seed)
        head = trainable(self.head_config)
        count = max(1, min(_START_ROUNDS // self.config.batch_rounds, len(sampler.epoch(0))))  # no round twice
        head.begin(itertools.islice(sampler.from_step(0), count), self.words)
        if self.start is not None:
            head.start_from(self.start)
        head.to(self.words.lm_head.device)
        self.team.share_state(head)
        return head

    def _step(self, step: int, head: TrainableHead, optimizer: AdamW, share: Share) -> Record:
        """Take one optimizer step; its gradients are those of all the step's batches joined. Figures are this process's."""
        config = self.config
        head.zero_grad(set_to_none=True)
        records = [self._backward(head, number, batch, share.rounds) for number, batch in share.batches]
        self.team.add_gradients(head)
        norm = nn.utils.clip_grad_norm_(head.parameters(), config.clip)
        optimizers.set_rate(optimizer, config.learning_rate * optimizers.cosine(step, config.steps, config.warmup))
        optimizer.step()
        return mean_record(records) | {"rounds": share.rounds, "norm": float(norm)}

    def _backward(self, head: TrainableHead, number: int, batch: PackedBatch, step_rounds: int) -> Record:
        config, rounds = self.config, len(batch.start)
        batch = batch.to(self.words.lm_head.device)
        seed = config.seed * 1_000_003 + number
        noise = uniform_noise(batch.features, config.noise, seed)
        with self.team.autocast(config.precision):
            depths = rollout(head, batch, self.batch_words(batch, seed), config.depths, config.width, noise)
            loss, record = config.objective(depths, rounds)
        (loss * (rounds / step_rounds)).backward()  # type: ignore[no-untyped-call]
        return record | {"loss": float(loss.detach())}
