#!/usr/bin/env python3
"""A language model whose large tables live on a parameter server, and whose LSTM lives on the trainer.

Two processes on this machine, started by the command itself::

    python examples/rnn.py

How it works. The model reads text word by word and predicts the next word. Nearly all of its weights are in
two tables with a row for each word: the embedding, which turns words into vectors, and the decoder, which
turns the LSTM's output into scores. Both are on the server; the trainer has only the LSTM. Words
go to the server and vectors come back; hidden states go there and a loss comes back, a single number. The
backward takes the same paths in reverse, and each worker updates its own weights.

The text is Python's own reference documentation, which comes with Python. Success is a perplexity (the number
of words between which the model hesitates) on text it has not seen that is much lower than that of knowing
only how common each word is.

Three ideas are marked (1) to (3) below: modules on another worker; gradients across workers; an
optimizer, with clipping and a learning-rate schedule, whose parameters are on both workers.
"""

from __future__ import annotations

import argparse
import collections
import re
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from farcall import dist_autograd, rpc
from farcall.dist_optim import DistributedOptimizer
from farcall.examples import Miss, example_parser, live_progress, positive, print_figures, rate, run_example
from farcall.rref import RemoteModule

TARGET = 0.6
"""The most that the perplexity may be, as a share of that of the words' frequencies."""


# ---------------------------------------------------------------- the text and the model: plain PyTorch


class Text(NamedTuple):
    """Text as numbers of words, of shape (words,), to train on and held out; and how many words there are."""

    training: Tensor
    held_out: Tensor
    vocabulary: int


def load_text(vocabulary: int) -> Text:
    """Python's reference documentation; words that are not among the most common count as one word, 0."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise RuntimeError("this example reads the documentation in pydoc_data, which is missing") from error
    words = re.findall(r"\w+|[^\w\s]", " ".join(topics[name] for name in sorted(topics)).lower())
    common = collections.Counter(words).most_common(vocabulary - 1)
    numbers = {word: number for number, (word, _) in enumerate(common, start=1)}
    text = torch.tensor([numbers.get(word, 0) for word in words])
    held_out = len(text) // 20
    return Text(text[held_out:], text[:held_out], vocabulary)


def frequency_perplexity(text: Text) -> float:
    """The perplexity on the held-out text of knowing only how common each word is."""
    counts = torch.bincount(text.training, minlength=text.vocabulary) + 1
    return float((counts / counts.sum()).log()[text.held_out].mean().neg().exp())


def make_embedding(vocabulary: int, size: int) -> nn.Module:
    """A vector for each word. Its gradient has just the rows of words that were looked up: it is sparse."""
    torch.sparse.check_sparse_tensor_invariants.disable()  # type: ignore[no-untyped-call]  # of Adagrad's own
    return nn.Embedding(vocabulary, size, sparse=True)


class Decoder(nn.Module):
    """Scores every word as the next one. Lives on the server.

    It answers with the loss alone: the scores, one for each word at each place, need not travel.
    """

    def __init__(self, size: int, vocabulary: int) -> None:
        super().__init__()
        self._scores = nn.Linear(size, vocabulary)

    def forward(self, hidden: Tensor, next_words: Tensor) -> Tensor:
        """The mean loss, of shape (), for hidden states of shape (..., size) and words of shape (...)."""
        scores = self._scores(hidden).flatten(0, -2)
        return nn.functional.cross_entropy(scores, next_words.flatten())


# ---------------------------------------------------------------- what the trainer has


class LanguageModel(nn.Module):
    """The whole model, as the trainer sees it."""

    def __init__(self, vocabulary: int, size: int) -> None:
        super().__init__()
        # (1) Modules that live elsewhere: they are made on the server and called from here like others.
        self.embedding = RemoteModule("server/cpu", make_embedding, args=(vocabulary, size))
        self.decoder = RemoteModule("server/cpu", Decoder, args=(size, vocabulary))
        self.lstm = nn.LSTM(size, size)

    def forward(self, words: Tensor) -> Tensor:
        """The loss of predicting each word from those before it, for words of shape (length, batch)."""
        hidden, _ = self.lstm(self.embedding(words[:-1]))
        loss: Tensor = self.decoder(hidden, words[1:])
        return loss

    def references(self) -> list[rpc.RRef[nn.Parameter]]:
        """A reference to each parameter, wherever it is."""
        here = [rpc.RRef(parameter) for parameter in self.lstm.parameters()]
        return [*self.embedding.remote_parameters(), *self.decoder.remote_parameters(), *here]

    def perplexity(self, text: Tensor) -> float:
        """The perplexity on a text."""
        with torch.no_grad():
            return float(self(in_columns(text, 20)[:200]).exp())


def in_columns(text: Tensor, columns: int) -> Tensor:
    """Return a text as ``columns`` texts side by side, of shape (length, columns)."""
    return text[: len(text) // columns * columns].view(columns, -1).t().contiguous()


def direct(options: argparse.Namespace) -> None:
    """The part of rank 0, the trainer."""
    text = load_text(options.vocabulary)
    model = LanguageModel(options.vocabulary, options.size)
    # (3) An optimizer for parameters on both workers: each has a local one for its own. Below, gradients are
    # clipped by their norm over both.
    optimizer = DistributedOptimizer(torch.optim.Adagrad, model.references(), lr=options.learning_rate)
    schedule = optimizer.lr_scheduler(torch.optim.lr_scheduler.LinearLR, 1.0, 0.2, total_iters=options.steps)
    columns = in_columns(text.training, options.batch)
    began = time.perf_counter()
    with live_progress("steps", options.steps, plain=options.plain) as progress:
        for step in range(options.steps):
            first = step * options.length % (len(columns) - options.length - 1)
            words = columns[first : first + options.length + 1]
            with dist_autograd.context() as context_id:
                loss = model(words)
                # (2) The gradients go back the ways that the words and vectors came, and stay where the
                # parameters are.
                dist_autograd.backward(context_id, [loss])
                optimizer.clip_grad_norm_(context_id, 1.0)
                optimizer.step(context_id)
            schedule.step()
            progress.advance(f"perplexity {loss.exp():.0f}")
    seconds = time.perf_counter() - began
    perplexity, baseline = model.perplexity(text.held_out), frequency_perplexity(text)
    print_figures(
        {
            "perplexity": f"{perplexity:.0f} on text held out",
            "of word frequencies": f"{baseline:.0f}",
            "words per second": f"{options.steps * options.length * options.batch / seconds:,.0f}",
        }
    )
    if perplexity > TARGET * baseline:
        raise Miss(f"The perplexity is {perplexity:.0f}; it should be {TARGET * baseline:.0f} at most.")


NAMES = ("trainer", "server")


def main() -> None:
    """Run one worker if its name is given, otherwise all of them."""
    parser = example_parser(__doc__)
    parser.add_argument("--steps", type=positive, default=300, help="of training (%(default)s)")
    parser.add_argument("--batch", type=positive, default=16, help="texts side by side (%(default)s)")
    parser.add_argument("--length", type=positive, default=20, help="words of each per step (%(default)s)")
    parser.add_argument("--vocabulary", type=positive, default=2000, help="words known (%(default)s)")
    parser.add_argument("--size", type=positive, default=64, help="of vectors and states (%(default)s)")
    parser.add_argument("--learning-rate", type=rate, default=0.1, help="of Adagrad (%(default)s)")
    run_example(parser, NAMES, direct)


if __name__ == "__main__":
    main()
