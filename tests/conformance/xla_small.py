"""One of PyTorch/XLA's programs, unmodified, with a small model and little data::

    farcall run tests/conformance/xla_small.py CHECKOUT PROGRAM [FLAG]...

These programs train a ResNet-50, a decoder of 200 million parameters or a linear layer of 140 million, and
most have no flag for a size. This module changes the modules that they import before they run: the models of
``torchvision`` and ``decoder_only_model``, the default of ``--input_dim``, and the batches of
``SampleGenerator``.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any, Final

import torch

__all__: list[str] = []

_STEPS: Final = 12
"""Maximum number of batches: programs print the loss of every tenth."""
_BATCH: Final = 8
"""Maximum number of samples in a batch."""
_LENGTH: Final = 32
"""Maximum size of all other dimensions of a batch: the side of an image, the length of a sequence."""
_WIDTH: Final = 64
"""Width of decoders."""
_PROFILES: Final = Path("/tmp/profile")
"""A directory that ``debug/train_resnet_profile.py`` requires."""


def _make_batches_small() -> None:
    utils: Any = importlib.import_module("torch_xla.utils.utils")
    generator = utils.SampleGenerator

    def small(data: tuple[torch.Tensor, ...], sample_count: int) -> Any:
        cut = tuple(each[(slice(_BATCH), *(slice(_LENGTH) for _ in each.shape[1:]))] for each in data)
        return generator(data=cut, sample_count=min(sample_count, _STEPS))

    utils.SampleGenerator = small


def _make_resnets_small() -> None:
    models: Any = importlib.import_module("torchvision.models")
    models.resnet50 = models.resnet18


def _make_decoders_small() -> None:
    config: Any = importlib.import_module("decoder_only_model").DecoderOnlyConfig
    made = config.__init__

    def small(self: object, **sizes: Any) -> None:
        made(self, **{"hidden_size": _WIDTH, "intermediate_size": 2 * _WIDTH, **sizes})

    config.__init__ = small


def _make_linear_models_small() -> None:
    args_parse: Any = importlib.import_module("args_parse")
    parse = args_parse.parse_common_options

    def small(opts: Any = None, **defaults: Any) -> Any:
        widths = {"--input_dim": {"type": int, "default": _LENGTH}}  # as batches are cut
        return parse(opts=[(name, widths.get(name, option)) for name, option in opts or ()], **defaults)

    args_parse.parse_common_options = small


def main(checkout: Path, program: Path, flags: list[str]) -> None:
    """Run a program."""
    sys.argv = [str(program), *flags]
    sys.path[0] = str(program.parent)
    text = program.read_text()
    _make_batches_small()
    if "resnet" in text:
        _make_resnets_small()
    if "decoder_only" in text:
        sys.path.append(str(checkout / "examples"))
        _make_decoders_small()
    if "spmd_linear_model" in text:
        _make_linear_models_small()
    if str(_PROFILES) in text:
        _PROFILES.mkdir(exist_ok=True)
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
