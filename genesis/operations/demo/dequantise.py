"""The main module of a process that turns a quantised GGUF model into a directory of Hugging Face's layout.

`genesis import` refuses quantised files, because their weights are not what a run would train. Here transformers
computes the weights that the file stands for, and they are saved in bfloat16 with the file's tokenizer.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main(argv: Sequence[str]) -> int:
    """Converts the GGUF file of the first argument into the directory of the second."""
    file, out = Path(argv[0]), Path(argv[1])
    closed: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False, "local_files_only": True}
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **closed)
    shape = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
    # The file holds this number in float32, which shows 1e-05 as 9.999999747378752e-06.
    shape["rms_norm_eps"] = float(f"{shape['rms_norm_eps']:.6g}")
    # A model that was read from a quantised file refuses to be saved: a new one takes its weights.
    model: Any = LlamaForCausalLM(LlamaConfig(**shape))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(file.parent, **closed).save_pretrained(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
