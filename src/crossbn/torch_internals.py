"""The one file that uses private names of torch: what no public name answers.

| question | private name | in torch since |
|---|---|---|
| Is a backward running, and which? | `_C._current_graph_task_id` | before 2.6 |
| Which hooks get the tensors that are saved? | `_C._autograd._top_saved_tensors_default_hooks` | 2.8 |
| Would unpacking this saved tensor call a hook? | `_C._autograd.SavedTensor.unpack_hook` | 2.13 |
| Is a transform of `torch.func` active? | `_C._functorch.maybe_current_level` | before 2.6 |
| Is this a tensor of such a transform? | `_C._functorch.is_functorch_wrapped_tensor` | before 2.6 |
| Is this a batch of gradients? | `_C._functorch.is_legacy_batchedtensor` | before 2.6 |
| Is this the eager rest of a compiled function? | `_C._dynamo.eval_frame.get_eval_frame_callback` | before 2.6 |
| Is `torch.export` tracing? | `compiler._is_exporting_flag` | before 2.8 |
| Is a function called when it is compiled, and its result a constant? | `_dynamo_marked_constant` | before 2.6 |
| Which group of processes has this name? | `distributed.distributed_c10d._resolve_process_group` | before 2.6 |
| Is this a tensor without values? | `_subclasses.fake_tensor.is_fake` | before 2.6 |

The second line is why torch 2.8 is the oldest version that is supported. A function that a later torch
lacks fails when this file is imported, not in the midst of training. `make test-torch VERSION=...` runs the tests on a
torch of that version.

The functions are for code that runs. Dynamo cannot trace most of them: a caller asks `torch.compiler.is_compiling()`
first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor, maybe_current_level
from torch._subclasses import fake_tensor
from torch.nn.modules import batchnorm

if not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
    raise ImportError(f"crossbn needs torch 2.8 or later, this is torch {torch.__version__}")

# Bound once: the functions below are called at every norm of every step.
_graph_task_id = torch._C._current_graph_task_id
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
_SAVED_TENSORS_TELL = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")

# The base classes of torch's norms, by which a user's own norm is recognised too. `nn` exports their subclasses only.
BatchNormBase = batchnorm._BatchNorm
NormBase = batchnorm._NormBase


def backward_is_running() -> bool:
    """Tell whether the running code was called by a backward: by a hook, a Function or a recomputation.

    There is no public name for it. `torch.is_grad_enabled()` says nothing: recomputation turns gradients on.
    """
    return _graph_task_id() != -1


def backward_id() -> int:
    """Return the number of the innermost backward that is running, -1 if there is none.

    No two backwards of a process have the same number. There is no public name for it.
    """
    return _graph_task_id()


def saved_tensor_hooks() -> tuple[Any, Any] | None:
    """Return the pack and unpack hooks that a tensor saved for backward would get now, None if it would get none.

    Activation checkpointing without reentry, `save_on_cpu` and other uses of `saved_tensors_hooks` set them; only the
    innermost pair counts. torch has public names to set them and none to read them.
    """
    return _top_hooks(False)


def has_hooks(saved: Any) -> bool:
    """Tell whether unpacking `saved`, a `grad_fn._raw_saved_...`, may call a hook, such as one that computes it again.

    A saved tensor that was freed has none. Before torch 2.13 a saved tensor does not tell, and the answer is whether
    hooks are set now: a tensor saved just before, in a region that has ended, is then computed again, which is slow and
    not wrong. No public name gives a node's saved tensors.
    """
    return saved.unpack_hook is not None if _SAVED_TENSORS_TELL else _top_hooks(False) is not None


def is_freed(tensor: Tensor) -> bool:
    """Tell whether the memory of `tensor` has been given back, as FSDP does after a forward; reading it would crash."""
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def inside_functorch() -> bool:
    """Tell whether a transform of `torch.func` (grad, vmap, jvp, functionalize, ...) is active.

    There is no public name for it.
    """
    return maybe_current_level() is not None


def is_wrapped(tensor: Tensor) -> bool:
    """Tell whether `tensor` was made by a transform of `torch.func`, active or over; it has no memory of its own.

    The same goes for the gradients of `torch.autograd.grad(..., is_grads_batched=True)`, which uses the transform that
    was before `torch.func`. There is no public name for either, and `type(tensor)` is Tensor.
    """
    return is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor)


def is_tracing() -> bool:
    """Tell whether `torch.jit.trace` is recording."""
    return torch.jit.is_tracing()  # type: ignore[attr-defined]  # documented, and not in torch.jit.__all__


def is_exporting() -> bool:
    """Tell whether `torch.export` is tracing, by itself or for ONNX.

    The public `torch.compiler.is_exporting` returns this flag, but in torch 2.8 it is True under `torch.compile` too.
    """
    return torch.compiler._is_exporting_flag


def graph_break_rest() -> bool:
    """Tell whether the running code is what `torch.compile` left to Python after a break of the graph.

    It is not compiled, yet what ran before it may have been: the autograd graph is not that of eager code. The compiler
    still watches such code, and its callback is set. `torch.compiler.is_compiling()` is False there, and there is no
    public name for it. The answer is False in a function that `torch.compiler.disable` has taken from the compiler.
    """
    return callable(_frame_callback())


def assume_constant_result(function: Callable[[str], bool]) -> Callable[[str], bool]:
    """Let torch.compile call a function when it comes by, and take its result for a constant.

    The public name for it imports the compiler, which takes as long as importing torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo looks for it
    return function


def is_fake(tensor: Tensor) -> bool:
    """Tell whether `tensor` has a shape and no values, as under `FakeTensorMode` and `torch.export`.

    There is no public name for it.
    """
    return fake_tensor.is_fake(tensor)


def process_group_called(name: str) -> torch.distributed.ProcessGroup:
    """Return the group whose `group_name` that is. There is a public name for the other direction only."""
    group: torch.distributed.ProcessGroup = torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return group


def copy_each_(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy each of `values` to its place in `targets`, in one call. The public way is a call for each."""
    torch._foreach_copy_(targets, values)
