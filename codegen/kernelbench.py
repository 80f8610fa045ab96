"""What KernelBench's text check rejects, so that no module is written that its harness would refuse.

The check looks at the whole file, docstrings and the CUDA text included, after cutting each line at the first `#` or
`//`. It works on words, so that prose can break it too ("a two-pass softmax").
"""

from __future__ import annotations

import re

_FORBIDDEN: tuple[tuple[str, str], ...] = (
    (r"\bpass\b", "the word pass"),
    (r"\btry\s*:", "try:"),
    (r"\bexcept\s*(?::|\s\w)", "except"),
    (r"\bimport\s+threading|\bfrom\s+threading\s+import|\bthreading\.Thread\s*\(", "threading"),
    (r"\bimport\s+multiprocessing|\bmultiprocessing\.(?:Process|Pool|Manager|Queue|Pipe)", "multiprocessing"),
    (r"concurrent\.futures|(?:Thread|Process)PoolExecutor", "executors"),
    (r"_make_subclass|torch\.Tensor\.__new__", "tensors made without their constructor"),
    (r"class\s+\w+.*\((?:torch\.)?Tensor\)", "a Tensor subclass"),
    (r"torch\.cuda\.(?:Event(?:\.record|\.elapsed_time)?|synchronize)\s*=", "an assignment to a CUDA timing function"),
    (r"\btime\.(?:perf_counter|time)\s*=", "an assignment to a clock"),
    (r"cuda\.Stream\s*\(|with\s+torch\.cuda\.stream|\.(?:wait|record)_stream\s*\(", "CUDA streams"),
    (r"\.half\s*\(|\.float16\s*\(|\.to\s*\(\s*(?:dtype\s*=\s*)?torch\.(?:float16|half)\b", "a cast to half precision"),
    (r"^[ \t]*from\s+__future__\s", "an import from __future__, which must stand first and does not once lines are put in front"),
)
_REQUIRED: tuple[tuple[str, str], ...] = (
    (r"__global__", "a CUDA kernel (__global__)"),
    (r"load_inline|cpp_extension", "load_inline or cpp_extension"),
    (r"\b(?:threadIdx|blockIdx|blockDim|gridDim)\.|__syncthreads\s*\(|__shared__\s|__device__\s", "a CUDA thread index or shared memory"),
)


def strip_comments(text: str) -> str:
    """`text` with each line cut at the first `#` or `//`, wherever it stands."""
    return "\n".join(re.split(r"#|//", line, maxsplit=1)[0] for line in text.split("\n"))


def violations(text: str) -> list[str]:
    """What in `text` makes KernelBench reject it; empty for an acceptable module."""
    code = strip_comments(text)
    found = [f"contains {what}" for pattern, what in _FORBIDDEN if re.search(pattern, code, re.MULTILINE)]
    return found + [f"lacks {what}" for pattern, what in _REQUIRED if not re.search(pattern, code)]


def acceptable(text: str) -> str:
    """One line of free text (a command, a note) with the words the check would reject marked by an underscore."""
    line = "".join(c if c.isprintable() else " " for c in text)
    line = re.sub(r"\b(pass|try|except)\b", r"\1_", line)
    return "(left out)" if any(found.startswith("contains") for found in violations(line)) else line
