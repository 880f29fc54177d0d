"""Each step of a layer on the GPU against float64, by the error that plain torch makes in the same dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from equivtest.errors import InvalidKernelInput
from equivtest.kernels.cuda_layers import MAX_FEW_ROWS, MAX_STRIP_ROWS, MAX_STRIP_WEIGHTS, CudaLayers
from equivtest.kernels.torch_layers import TorchLayers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

EPS = 1e-5
ROWS = (1, 2, 3, 5, 8, 9, 16, 40, 64, 200, 512, 520)
# in_features, out_features: the matrices of SmolLM2-135M, some of Qwen3's, sums that take a warp several rounds or
# leave most warps none, output counts that fill no block or strip, and an input that is not in chunks of 8 numbers.
MATRICES = (
    *((576, 960), (576, 3072), (1536, 576), (2560, 6144), (9728, 2560), (2560, 19456), (3072, 1024), (3072, 5120)),
    *((64, 16404), (40, 6), (136, 300), (8, 4), (24, 14), (36, 50)),
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
OPS = ("head", "rms_norm", "normed_linear", "normed_gate", "add_linear")


@pytest.fixture(scope="module")
def layers() -> CudaLayers:
    return CudaLayers()


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to("cuda", dtype)


def operands(rows: int, size: int, outputs: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "x": random(rows, size, dtype=dtype),
        "norm": 1 + 0.3 * random(size, dtype=dtype),
        "weight": random(outputs, size, dtype=dtype, seed=1) / size**0.5,
        "hidden": random(rows, outputs, dtype=dtype, seed=2),
    }


def run(layers: CudaLayers | TorchLayers, op: str, given: dict[str, Tensor]) -> Tensor:
    x, norm, hidden = given["x"].clone(), given["norm"], given["hidden"].clone()
    weight, normed = layers.linear(given["weight"]), layers.linear(given["weight"], norm)
    match op:
        case "head":
            return layers.head(x, weight).to(x.dtype)
        case "rms_norm":
            return layers.rms_norm(layers.residual(x), norm, EPS)
        case "normed_linear":
            return layers.normed_linear(layers.residual(x), EPS, normed)
        case "normed_gate":
            return layers.normed_gate(layers.residual(x), EPS, normed)
        case _:
            sum_ = layers.add_linear(layers.residual(hidden), x, weight)
            return sum_ if isinstance(sum_, Tensor) else sum_.narrow


def exact(op: str, given: dict[str, Tensor]) -> Tensor:
    """The same in float64."""
    x, norm, weight, hidden = (given[name].double() for name in ("x", "norm", "weight", "hidden"))
    normed = x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * norm
    match op:
        case "head":
            return x @ weight.T
        case "rms_norm":
            return normed
        case "normed_linear":
            return normed @ weight.T
        case "normed_gate":
            gate, up = (normed @ weight.T).chunk(2, dim=-1)
            return functional.silu(gate) * up
        case _:
            return hidden + x @ weight.T


def excess(out: Tensor, plain: Tensor, truth: Tensor) -> float:
    """Largest error of `out` in units of plain torch's largest error, which is all rounding; a few units in the last
    place where torch happens to make none."""
    scale = torch.finfo(out.dtype).eps * truth.abs().max()
    error = (out.double() - truth).abs().max()
    return float(error / torch.maximum((plain.double() - truth).abs().max(), scale))


# Sums in another order may be off by somewhat more than torch's; a wrong element, by hundreds of units.
LARGEST_EXCESS = 3.0


@DTYPES
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("matrix", MATRICES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_an_op_is_as_exact_as_plain_torch(
    layers: CudaLayers, op: str, matrix: tuple[int, int], rows: int, dtype: torch.dtype
) -> None:
    given = operands(rows, *matrix, dtype)
    out = run(layers, op, given)
    assert out.shape == (truth := exact(op, given)).shape
    assert excess(out, run(TorchLayers(), op, given), truth) <= LARGEST_EXCESS


def _without_last(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, -8:] = 0
    return x


NORMED = ("rms_norm", "normed_linear", "normed_gate")
FAULTS = {
    "the last input is left out": (OPS, "x", _without_last),
    "the norm's weight is shifted": (NORMED, "norm", lambda x: x.roll(1)),
    "gate and up are swapped": (("normed_gate",), "weight", lambda x: x.roll(len(x) // 2, dims=0)),
    "the residual is another row's": (("add_linear",), "hidden", lambda x: x.roll(1, dims=0)),
    "outputs are shifted": (("head", "normed_linear"), "weight", lambda x: x.roll(1, dims=0)),
}


@DTYPES
@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize(("op", "fault"), [(op, fault) for fault, (ops, _, _) in FAULTS.items() for op in ops])
def test_a_planted_fault_is_seen(layers: CudaLayers, op: str, fault: str, rows: int, dtype: torch.dtype) -> None:
    given = operands(rows, 576, 960, dtype)
    _, name, plant = FAULTS[fault]
    out = run(layers, op, given | {name: plant(given[name])})
    assert excess(out, run(TorchLayers(), op, given), exact(op, given)) > LARGEST_EXCESS


@pytest.mark.parametrize("rows", [1, 8, 64, 520])
def test_many_additions_round_once_each_in_float32(layers: CudaLayers, rows: int) -> None:
    """A stream of large values that small ones are added to: bfloat16 would lose them all."""
    hidden = torch.full((rows, 576), 256.0, dtype=torch.bfloat16, device="cuda")
    x, weight = 0.5 * random(rows, 64, dtype=torch.bfloat16), layers.linear(random(576, 64, dtype=torch.bfloat16) / 32)
    stream = layers.residual(hidden.clone())
    for _ in range(20):
        stream = layers.add_linear(stream, x, weight)
    expected = hidden.double() + 20 * (x.double() @ weight.T.double())
    assert (stream.wide - expected).abs().max() <= 1e-3
    assert torch.equal(stream.narrow, stream.wide.bfloat16())
    narrow = TorchLayers().residual(hidden.clone())
    for _ in range(20):
        narrow = TorchLayers().add_linear(narrow, x, TorchLayers().linear(weight))
    assert (narrow - expected).abs().max() > 0.1, "the twin: a bfloat16 stream is seen"


@pytest.mark.parametrize("matrix", [(576, 960), (1536, 576), (2560, 6144)], ids=str)
@pytest.mark.parametrize("op", ["normed_linear", "normed_gate", "add_linear"])
def test_a_row_is_the_same_to_the_last_bit_in_any_number_of_rows(
    layers: CudaLayers, op: str, matrix: tuple[int, int]
) -> None:
    """As far as a product of that matrix is our own."""
    most = MAX_STRIP_ROWS if matrix[0] * matrix[1] <= MAX_STRIP_WEIGHTS else MAX_FEW_ROWS
    many = operands(most, *matrix, torch.bfloat16)
    whole = run(layers, op, many)
    for rows in {1, 2, 3, 8, 9, 17, 33, 40, most} & set(range(most + 1)):
        few = {name: value if name in ("norm", "weight") else value[:rows] for name, value in many.items()}
        assert torch.equal(run(layers, op, few), whole[:rows]), rows
    other = many | {"x": many["x"].roll(1, dims=0)}
    assert not torch.equal(run(layers, op, other), whole), "the twin: another row is seen"


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_few_rows_agree_with_the_path_of_many_to_a_rounding(layers: CudaLayers, rows: int) -> None:
    """What a verification computes for a row is what a large batch computes for it, but for the order of sums."""
    many = operands(64, 576, 960, torch.bfloat16)
    few = {name: value if name in ("norm", "weight") else value[:rows] for name, value in many.items()}
    for op in OPS:
        difference = (run(layers, op, many)[:rows].double() - run(layers, op, few).double()).abs().max()
        assert difference <= 2 * torch.finfo(torch.bfloat16).eps * exact(op, few).abs().max(), op


@DTYPES
def test_no_rows_are_no_work(layers: CudaLayers, dtype: torch.dtype) -> None:
    given = operands(0, 576, 960, dtype)
    for op in OPS:
        assert run(layers, op, given).shape == exact(op, given).shape


class Rotation:
    """The arguments of one rotate_and_store call; rows go to scattered slots."""

    def __init__(self, rows: int, heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> None:
        self.heads = random(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
        angles = torch.outer(torch.arange(500.0), 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim))
        angles = torch.cat((angles, angles), dim=-1)
        self.rotary = angles.cos().to("cuda", dtype), angles.sin().to("cuda", dtype)
        generator = torch.Generator().manual_seed(rows)
        self.positions = torch.randint(500, (rows,), generator=generator).cuda()
        self.norm = 1 + 0.3 * random(heads + kv_heads, head_dim, dtype=dtype, seed=1)
        self.pages = random(rows // page_size + 3, 2, page_size, kv_heads, head_dim, dtype=dtype)
        num_slots = self.pages.shape[0] * page_size
        self.slots = torch.randperm(num_slots, generator=generator)[:rows].cuda()

    def run(self, layers: CudaLayers | TorchLayers, *, normed: bool) -> tuple[Tensor, Tensor]:
        """Queries and the cache afterwards."""
        pages = self.pages.clone()
        norm = self.norm if normed else None
        query = layers.rotate_and_store(self.heads, self.rotary, self.positions, norm, EPS, pages, self.slots)
        return query, pages


ROTATIONS = pytest.mark.parametrize(
    "shape",
    [(1, 9, 3, 64, 16), (256, 9, 3, 64, 16), (33, 32, 8, 128, 16), (40, 4, 4, 96, 1), (7, 2, 1, 10, 3)],
    ids=str,
)


@DTYPES
@ROTATIONS
def test_the_rotation_is_bitwise_plain_torch(
    layers: CudaLayers, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    call = Rotation(*shape, dtype)
    for out, plain in zip(call.run(layers, normed=False), call.run(TorchLayers(), normed=False), strict=True):
        assert torch.equal(out, plain)


@DTYPES
@ROTATIONS
def test_with_norms_the_rotation_is_plain_torch_to_a_rounding(
    layers: CudaLayers, shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    """The sum of squares may differ in its last bit, and each of four roundings then by a unit."""
    call = Rotation(*shape, dtype)
    for out, plain in zip(call.run(layers, normed=True), call.run(TorchLayers(), normed=True), strict=True):
        torch.testing.assert_close(out, plain, rtol=0, atol=4 * torch.finfo(dtype).eps * float(plain.abs().max()))
        assert not torch.equal(out, call.run(TorchLayers(), normed=False)[0 if out.dim() == 3 else 1])


@pytest.mark.parametrize("fault", ["positions", "slots", "heads"])
def test_a_planted_fault_of_the_rotation_is_seen(layers: CudaLayers, fault: str) -> None:
    call = Rotation(33, 9, 3, 64, 16, torch.float32)
    query, pages = call.run(TorchLayers(), normed=False)
    setattr(call, fault, getattr(call, fault).roll(1, dims=0))
    planted_query, planted_pages = call.run(layers, normed=False)
    assert not torch.equal(planted_pages, pages)
    assert torch.equal(planted_query, query) == (fault == "slots")


def test_an_odd_head_cannot_turn(layers: CudaLayers) -> None:
    call = Rotation(3, 2, 1, 10, 4, torch.float32)
    call.heads, call.pages = call.heads[..., :9], call.pages[..., :9].contiguous()
    with pytest.raises(InvalidKernelInput, match="head_dim must be even"):
        call.run(layers, normed=False)


@DTYPES
@pytest.mark.parametrize("rows", [1, 64])
def test_a_graph_holds_every_op(layers: CudaLayers, rows: int, dtype: torch.dtype) -> None:
    given = operands(rows, 576, 960, dtype)
    rotation = Rotation(rows, 9, 3, 64, 16, dtype)

    def everything() -> list[Tensor]:
        return [*(run(layers, op, given) for op in OPS), *rotation.run(layers, normed=True)]

    everything()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    given["x"].mul_(-0.5)
    rotation.heads.mul_(-0.5)
    graph.replay()
    for out, now in zip(captured, everything(), strict=True):
        assert torch.equal(out, now)
