"""Every operator of the table against ONNX Runtime, each in a graph of its own written in ONNX text."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import onnx.reference
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

from lightning_ort import GradientGraphBuilder, UnsupportedError
from lightning_ort.onnx_reader import to_torch
from lightning_ort.onnx_reader.load import STRUCTURE
from lightning_ort.onnx_reader.reader import CONTROL_FLOW
from lightning_ort.onnx_reader.registry import OPERATORS

OPTIONS = onnxruntime.SessionOptions()
OPTIONS.intra_op_num_threads = 1
OPTIONS.log_severity_level = 4


@dataclasses.dataclass
class Case:
    body: str
    """nodes in ONNX text; the results are y, and y1, y2, ... where ``out`` has several types"""
    inputs: dict[str, Any]
    """a shape for random normal numbers, or an array"""
    opset: int = 17
    out: str = "float"
    since: tuple[int, int] = (1, 19)
    """the first ONNX Runtime that follows the specification here"""
    atol: float = 2e-6

    def model(self) -> onnx.ModelProto:
        names = ["y", *[f"y{i}" for i in range(1, len(self.out.split()))]]
        results = ", ".join(f"{t}[] {n}" for t, n in zip(self.out.split(), names, strict=True))
        heads = ", ".join(f"{_TYPES[a.dtype.name]}[{_dims(a)}] {n}" for n, a in self.arrays().items())
        imports = f'"" : {self.opset}, "com.microsoft" : 1, "ai.onnx.ml" : 2'
        return onnx.parser.parse_model(
            f"<ir_version: 8, opset_import: [{imports}]> g ({heads}) => ({results}) {{ {self.body} }}"
        )

    def arrays(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(3)
        return {
            n: random.standard_normal(v).astype(np.float32) if isinstance(v, tuple) else np.asarray(v)
            for n, v in self.inputs.items()
        }


_TYPES = {"float32": "float", "float64": "double", "int64": "int64", "int32": "int32", "bool": "bool", "uint8": "uint8"}


def _dims(array: np.ndarray) -> str:
    return ",".join(map(str, array.shape))


def _ints(*values: int) -> str:
    return f"Constant<value = int64[{len(values)}] {{{','.join(map(str, values))}}}>()"


X = (2, 3, 4)
IMAGE = (2, 3, 7, 6)
POSITIVE = np.linspace(0.1, 3, 24, dtype=np.float32).reshape(X)
UNIT = np.linspace(-0.9, 0.9, 24, dtype=np.float32).reshape(X)
INTEGERS = np.array([[7, -7, 5], [-5, 3, -1]])
DIVISORS = np.array([[2, 2, -3], [-3, 4, 2]])
FLAGS = np.array([[True, False, True], [False, False, True]])

PLAIN = ["Abs", "Neg", "Exp", "Sin", "Cos", "Tan", "Sinh", "Cosh", "Tanh", "Atan", "Asinh", "Erf", "Floor", "Ceil",
         "Round", "Sign", "Sigmoid", "Relu", "Softplus", "Softsign", "HardSwish", "Reciprocal"]  # fmt: skip

CASES: dict[str, Case] = {
    **{name: Case(f"y = {name}(x)", {"x": X}) for name in PLAIN},
    **{name: Case(f"y = {name}(x)", {"x": UNIT}) for name in ("Acos", "Asin", "Atanh")},
    **{name: Case(f"y = {name}(x)", {"x": POSITIVE}) for name in ("Log", "Sqrt")},
    "Acosh": Case("y = Acosh(x)", {"x": POSITIVE + 1}),
    "Mish": Case("y = Mish(x)", {"x": X}, 18),
    **{n: Case(f"y = {n}(a, b)", {"a": X, "b": (3, 1)}) for n in ("Add", "Sub", "Mul", "Div", "Sum", "Mean")},
    **{n: Case(f"y = {n}(a, b, a)", {"a": X, "b": (3, 1)}) for n in ("Max", "Min")},
    **{
        n: Case(f"y = {n}(a, b)", {"a": (2, 3), "b": (2, 3)}, out="bool")
        for n in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal")
    },
    **{n: Case(f"y = {n}(a, b)", {"a": FLAGS, "b": ~FLAGS[:1]}, out="bool") for n in ("And", "Or", "Xor")},
    "Not": Case("y = Not(a)", {"a": FLAGS}, out="bool"),
    **{
        n: Case(f"y = {n}(a, b)", {"a": INTEGERS, "b": DIVISORS}, 18, "int64")
        for n in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
    },
    "BitwiseNot": Case("y = BitwiseNot(a)", {"a": INTEGERS}, 18, "int64"),
    "BitShift": Case(
        'y = BitShift<direction="LEFT">(a, b) y1 = BitShift<direction="RIGHT">(a, b)',
        {"a": np.array([9, 16, 3], np.uint8), "b": np.array([1, 2, 1], np.uint8)}, out="uint8 uint8",
    ),
    "Div of whole numbers": Case("y = Div(a, b)", {"a": INTEGERS, "b": DIVISORS}, out="int64"),
    "Div of a constant": Case("c = Constant<value = float {2.0}>() y = Div(c, x)", {"x": POSITIVE}),
    "Sub from a constant": Case("c = Constant<value = float {2.0}>() y = Sub(c, x)", {"x": X}),
    "Less than a constant": Case("c = Constant<value = float {0.1}>() y = Less(c, x)", {"x": X}, out="bool"),
    "Mod": Case("y = Mod(a, b)", {"a": INTEGERS, "b": DIVISORS}, out="int64"),
    "Mod of floats": Case("y = Mod<fmod=1>(a, b)", {"a": X, "b": POSITIVE}),
    "Pow": Case("y = Pow(a, b)", {"a": POSITIVE, "b": X}),
    "Pow of whole numbers": Case("y = Pow(a, b)", {"a": POSITIVE, "b": np.array(3)}),
    "IsNaN": Case("y = IsNaN(x)", {"x": np.array([1, np.nan], np.float32)}, out="bool"),
    "IsInf": Case("y = IsInf<detect_negative=0>(x)", {"x": np.array([1, np.inf, -np.inf], np.float32)}, out="bool"),
    "Where": Case("y = Where(c, a, b)", {"c": FLAGS, "a": (2, 3), "b": (1, 3)}),
    "Where with constants": Case("z = Constant<value = float {0.5}>() y = Where(c, a, z)", {"c": FLAGS, "a": (2, 3)}),
    "Clip": Case("a = Constant<value = float {-0.5}>() y = Clip(x, a)", {"x": X}),
    "Clip above": Case("b = Constant<value = float {0.5}>() y = Clip(x, , b)", {"x": X}),
    "Identity": Case("z = Identity(x) y = Relu(z)", {"x": X}),
    "Cast": Case("y = Cast<to=7>(x)", {"x": X}, out="int64"),
    "CastLike": Case("y = CastLike(x, l)", {"x": X, "l": np.array(1.0)}, 15, "double"),
    # activations
    "HardSigmoid": Case("y = HardSigmoid<alpha=0.3, beta=0.4>(x) y1 = HardSigmoid<alpha=0.166666667>(x)", {"x": X},
                        out="float float"),
    **{n: Case(f"y = {n}<alpha=0.7>(x)", {"x": X}) for n in ("LeakyRelu", "ThresholdedRelu", "Elu", "Celu")},
    "Selu": Case("y = Selu<alpha=1.5, gamma=1.2>(x)", {"x": X}),
    "PRelu": Case("y = PRelu(x, s)", {"x": X, "s": (3, 1)}),
    "Gelu": Case('y = Gelu(x) y1 = Gelu<approximate="tanh">(x)', {"x": X}, 20, "float float"),
    "ai.onnx.ml.LabelEncoder": Case(
        "y = ai.onnx.ml.LabelEncoder<keys_int64s=[5, -7, 5], values_int64s=[50, 70, 51], default_int64=1>(x)",
        {"x": INTEGERS}, out="int64",
    ),
    "LabelEncoder to floats": Case(
        "y = ai.onnx.ml.LabelEncoder<keys_floats=[0.5, 1.5], values_floats=[5.0, 7.0], default_float=0.25>(x)",
        {"x": np.array([0.5, 1.5, 1.0], np.float32)},
    ),
    "com.microsoft.Gelu": Case("y = com.microsoft.Gelu(x)", {"x": X}),
    "com.microsoft.FastGelu": Case("y = com.microsoft.FastGelu(x, b)", {"x": X, "b": (4,)}),
    "com.microsoft.QuickGelu": Case("y = com.microsoft.QuickGelu<alpha=1.5>(x)", {"x": X}),
    "Shrink": Case("y = Shrink<bias=0.2, lambd=0.4>(x)", {"x": X}),
    **{n: Case(f"y = {n}<axis=1>(x)", {"x": X}) for n in ("Softmax", "LogSoftmax", "Hardmax")},
    # products
    "MatMul": Case("y = MatMul(a, b)", {"a": (2, 3, 4), "b": (4, 5)}),
    "Gemm": Case("y = Gemm<transA=1, transB=1, alpha=0.5, beta=2.0>(a, b, c)", {"a": (4, 2), "b": (5, 4), "c": (2, 1)}),
    "Gemm with a bias": Case("y = Gemm(a, b, c)", {"a": (2, 4), "b": (4, 5), "c": (5,)}),
    "Gemm alone": Case("y = Gemm<alpha=0.5>(a, b)", {"a": (2, 4), "b": (4, 5)}),
    "Det": Case("y = Det(x)", {"x": (2, 3, 3)}),
    "Einsum": Case('y = Einsum<equation="bij,bkj->bik">(a, b)', {"a": (2, 3, 4), "b": (2, 5, 4)}),
    # shapes
    "Shape": Case("y = Shape<start=1>(x)", {"x": X}, out="int64"),
    "Size": Case("y = Size(x)", {"x": X}, out="int64"),
    "Reshape": Case(f"s = {_ints(0, -1, 2)} y = Reshape(x, s)", {"x": X}),
    "Reshape to nothing": Case(f"s = {_ints(0, 5)} y = Reshape<allowzero=1>(x, s)", {"x": (0, 3)}),
    "Flatten": Case("y = Flatten<axis=-1>(x) y1 = Flatten<axis=0>(x)", {"x": X}, out="float float"),
    "Transpose": Case("y = Transpose(x) y1 = Transpose<perm=[1,0,2]>(x)", {"x": X}, out="float float"),
    "Squeeze": Case(f"a = {_ints(-1, 0)} y = Squeeze(x, a) y1 = Squeeze(x)", {"x": (1, 3, 1)}, out="float float"),
    "Unsqueeze": Case(f"a = {_ints(-1, 0)} y = Unsqueeze(x, a)", {"x": (3,)}),
    "Expand": Case(f"s = {_ints(2, 1, 4)} y = Expand(x, s)", {"x": (3, 1)}),
    "Tile": Case(f"r = {_ints(2, 1, 3)} y = Tile(x, r)", {"x": X}),
    "Concat": Case("y = Concat<axis=-2>(a, b, a)", {"a": (2, 3), "b": (1, 3)}),
    "Split": Case(f"s = {_ints(1, 3)} y, y1 = Split<axis=2>(x, s)", {"x": X}, out="float float"),
    "Split in equal parts": Case("y, y1 = Split<axis=-1>(x)", {"x": X}, out="float float"),
    "Split with a remainder": Case("y, y1 = Split<axis=1, num_outputs=2>(x)", {"x": X}, 18, "float float"),
    "Slice": Case(f"s = {_ints(1, -3)} e = {_ints(9, -1)} a = {_ints(1, -1)} y = Slice(x, s, e, a)", {"x": X}),
    "Slice by steps": Case(
        f"s = {_ints(-1, 3)} e = {_ints(-99, 0)} a = {_ints(1, 2)} t = {_ints(-1, -2)} y = Slice(x, s, e, a, t)",
        {"x": X},
    ),
    "Slice backwards from beyond": Case(
        f"s = {_ints(99)} e = {_ints(1)} a = {_ints(2)} t = {_ints(-1)} y = Slice(x, s, e, a, t)", {"x": X}
    ),
    "Pad": Case(f"p = {_ints(0, 1, 0, 2)} v = Constant<value = float {{1.5}}>() y = Pad(x, p, v)", {"x": (2, 3)}),
    "Pad that cuts": Case(f"p = {_ints(0, -1, 0, 2)} y = Pad(x, p)", {"x": (2, 3)}),
    "Pad by axes": Case(f"p = {_ints(1, 2)} a = {_ints(-1)} y = Pad(x, p, , a)", {"x": (2, 3)}, 18),
    **{
        f"Pad {mode}": Case(f'p = {_ints(0, 0, 1, 2, 0, 0, 0, 1)} y = Pad<mode="{mode}">(x, p)', {"x": IMAGE}, opset)
        for mode, opset in (("reflect", 17), ("edge", 17), ("wrap", 19))
    },
    "DepthToSpace": Case(
        'y = DepthToSpace<blocksize=2>(x) y1 = DepthToSpace<blocksize=2, mode="CRD">(x)', {"x": (1, 8, 2, 3)},
        out="float float",
    ),
    "SpaceToDepth": Case("y = SpaceToDepth<blocksize=2>(x)", {"x": (1, 2, 4, 6)}),
    "Trilu": Case("k = Constant<value = int64 {1}>() y = Trilu(x, k) y1 = Trilu<upper=0>(x)", {"x": X},
                  out="float float"),
    "ReverseSequence": Case(
        "y = ReverseSequence<batch_axis=0, time_axis=1>(x, l)", {"x": (2, 4, 3), "l": np.array([3, 1])}
    ),
    # made from sizes
    "ConstantOfShape": Case(
        "s = Shape(x) z = ConstantOfShape<value = float[1] {2.5}>(s) y = Add(z, x)", {"x": X}
    ),
    "Range": Case(
        "a = Constant<value = int64 {7}>() b = Constant<value = int64 {1}>() d = Constant<value = int64 {-2}>()"
        "y = Range(a, b, d)", {}, out="int64",
    ),
    "EyeLike": Case("y = EyeLike<k=1>(x)", {"x": (3, 4)}),
    "OneHot": Case(
        "d = Constant<value = int64[1] {4}>() v = Constant<value = float[2] {0.0, 2.0}>() y = OneHot<axis=0>(i, d, v)",
        {"i": np.array([[0, -1], [3, 9]])},
    ),
    # indices
    "Gather": Case("y = Gather<axis=1>(x, i)", {"x": X, "i": np.array([[0, -1], [2, 1]])}),
    "Gather of one": Case("y = Gather<axis=-1>(x, i)", {"x": X, "i": np.array(-2)}),
    "Gather of rows": Case("y = Gather(x, i)", {"x": (5, 3), "i": np.array([[0, -1], [2, 1]], np.int32)}),
    "GatherElements": Case("y = GatherElements<axis=1>(x, i)", {"x": (2, 3), "i": np.array([[0, -1], [2, 2]])}),
    "GatherND": Case("y = GatherND(x, i)", {"x": X, "i": np.array([[0, -1], [1, 0]])}),
    "GatherND in batches": Case("y = GatherND<batch_dims=1>(x, i)", {"x": X, "i": np.array([[[0]], [[-1]]])}),
    **{
        f"ScatterElements {r}": Case(
            f'y = ScatterElements<axis=1, reduction="{r}">(x, i, u)',
            {"x": (2, 3), "i": np.array([[0, -1], [2, 1]]), "u": (2, 2)}, 18,
        )
        for r in ("none", "add", "mul", "max", "min")
    },
    **{
        f"ScatterND {r}": Case(
            f'y = ScatterND<reduction="{r}">(x, i, u)', {"x": X, "i": np.array([[0, -1], [1, 0]]), "u": (2, 4)}, 18
        )
        for r in ("none", "add")
    },
    "Compress": Case("y = Compress<axis=1>(x, c)", {"x": X, "c": np.array([True, False, True])}),
    "Compress flat": Case("y = Compress(x, c)", {"x": (2, 2), "c": np.array([False, True, True])}),
    "NonZero": Case("y = NonZero(x)", {"x": np.array([[0, 2], [3, 0]], np.float32)}, out="int64"),
    "TopK": Case(f"k = {_ints(2)} y, y1 = TopK<axis=1>(x, k)", {"x": X}, out="float int64"),
    "TopK smallest": Case(f"k = {_ints(2)} y, i = TopK<largest=0>(x, k)", {"x": X}),
    # reductions
    **{
        n: Case(f"y = {n}<axes=[-1, 0], keepdims=0>(x) y1 = {n}(x)", {"x": POSITIVE}, 13, "float float")
        for n in ("ReduceMean", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare",
                  "ReduceLogSum", "ReduceLogSumExp")
    },
    "ReduceSum": Case(f"a = {_ints(-1)} y = ReduceSum<keepdims=0>(x, a) y1 = ReduceSum(x)", {"x": X},
                      out="float float"),
    "ReduceMax with axes as an input": Case(f"a = {_ints(1)} y = ReduceMax(x, a)", {"x": X}, 18),
    "ReduceSum over no axes": Case("y = ReduceSum<noop_with_empty_axes=1>(x)", {"x": X}, since=(1, 20)),
    "ReduceMean of whole numbers": Case("y = ReduceMean<keepdims=0>(x)", {"x": INTEGERS.astype(np.int32)}, 17, "int32"),
    **{
        n: Case(f"y = {n}<axis=1, keepdims=0>(x) y1 = {n}<axis=1, select_last_index=1>(x)",
                {"x": np.array([[1, 3, 3], [0, 0, 2]], np.float32)}, out="int64 int64")
        for n in ("ArgMax", "ArgMin")
    },
    "CumSum": Case("a = Constant<value = int64 {1}>() y = CumSum(x, a) y1 = CumSum<exclusive=1, reverse=1>(x, a)",
                   {"x": X}, out="float float"),
    # convolutions and pooling
    "Conv": Case("y = Conv<pads=[1,1,1,1], strides=[2,1]>(x, w, b)", {"x": IMAGE, "w": (4, 3, 3, 3), "b": (4,)}),
    "Conv in groups": Case("y = Conv<group=3, dilations=[2,2]>(x, w)", {"x": IMAGE, "w": (6, 1, 3, 3)}),
    "Conv with uneven pads": Case("y = Conv<pads=[1,0,2,1]>(x, w)", {"x": IMAGE, "w": (4, 3, 3, 2)}),
    "Conv SAME_LOWER": Case('y = Conv<auto_pad="SAME_LOWER", strides=[2,2]>(x, w)', {"x": IMAGE, "w": (4, 3, 3, 4)}),
    **{
        f"{op} of a {kind} by a tensor": Case(
            f"c = Constant<{constant}>() y = {op}(c, x)", {"x": np.array(divisors, dtype)}, out=out
        )
        for op in ("Div", "Mod<fmod=1>")
        for kind, constant, divisors, dtype, out in (
            ("whole number", "value = int64 {7}", [1, 2, -3], np.int64, "int64"),
            ("number", "value = float {7.0}", [1.5, 2, -3], np.float32, "float"),
        )
    },
    "Mod of a whole number by a tensor": Case(
        "c = Constant<value = int64 {7}>() y = Mod(c, x)", {"x": np.array([1, 2, -3])}, out="int64"
    ),
    "Div of a size by a tensor": Case("s = Size(x) y = Div(s, x)", {"x": np.array([1, 2, -3])}, out="int64"),
    "Conv SAME_UPPER, one left out": Case(
        'y = Conv<auto_pad="SAME_UPPER", strides=[2,2]>(x, w)', {"x": (1, 3, 4, 8), "w": (4, 3, 1, 1)}
    ),
    "Conv over one axis": Case('y = Conv<auto_pad="SAME_UPPER">(x, w)', {"x": (2, 3, 7), "w": (4, 3, 4)}),
    "ConvTranspose": Case(
        "y = ConvTranspose<strides=[2,2], output_padding=[1,0], pads=[1,1,1,1]>(x, w, b)",
        {"x": IMAGE, "w": (3, 4, 3, 3), "b": (4,)},
    ),
    "ConvTranspose with uneven pads": Case(
        "y = ConvTranspose<strides=[2,1], pads=[1,0,0,2]>(x, w)", {"x": IMAGE, "w": (3, 4, 3, 3)}
    ),
    "ConvTranspose to a shape": Case(
        "y = ConvTranspose<strides=[2,2], output_shape=[14,12]>(x, w)", {"x": IMAGE, "w": (3, 4, 3, 3)}
    ),
    "MaxPool": Case("y = MaxPool<kernel_shape=[3,2], strides=[2,2], pads=[1,0,1,0], ceil_mode=1>(x)", {"x": IMAGE}),
    "MaxPool with indices": Case(
        "y, y1 = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)", {"x": IMAGE}, out="float int64"
    ),
    "MaxPool with uneven pads": Case("y = MaxPool<kernel_shape=[2,2], pads=[0,0,1,1]>(x)", {"x": IMAGE}),
    "AveragePool": Case("y = AveragePool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x)", {"x": IMAGE}),
    "AveragePool with padding counted": Case(
        "y = AveragePool<kernel_shape=[3,3], pads=[1,0,1,2], count_include_pad=1>(x)", {"x": IMAGE}
    ),
    "AveragePool with uneven pads": Case("y = AveragePool<kernel_shape=[2,3], pads=[0,1,1,0]>(x)", {"x": IMAGE}),
    "LpPool": Case("y = LpPool<kernel_shape=[2,3], p=2, pads=[0,1,0,1]>(x)", {"x": IMAGE}),
    **{n: Case(f"y = {n}(x)", {"x": IMAGE}) for n in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")},
    "GridSample": Case('y = GridSample<mode="bilinear", padding_mode="border">(x, g)',
                       {"x": IMAGE, "g": UNIT.reshape(2, 2, 3, 2)}, 16),
    # normalization
    "BatchNormalization": Case(
        "y = BatchNormalization(x, s, b, m, v)", {"x": IMAGE, "s": (3,), "b": (3,), "m": (3,), "v": POSITIVE[0, :, 0]}
    ),
    "BatchNormalization in training": Case(
        "y, y1, y2 = BatchNormalization<training_mode=1, momentum=0.8>(x, s, b, m, v)",
        {"x": IMAGE, "s": (3,), "b": (3,), "m": (3,), "v": POSITIVE[0, :, 0]}, out="float float float",
    ),
    "InstanceNormalization": Case("y = InstanceNormalization(x, s, b)", {"x": IMAGE, "s": (3,), "b": (3,)}),
    "LayerNormalization": Case(
        "y, y1, y2 = LayerNormalization<axis=1>(x, s, b)", {"x": X, "s": (3, 4), "b": (3, 4)}, out="float float float"
    ),
    "LayerNormalization with one scale": Case(
        "y = LayerNormalization<axis=1>(x, s)", {"x": X, "s": (4,)}, since=(1, 20)
    ),
    "GroupNormalization": Case(
        "y = GroupNormalization<num_groups=2>(x, s, b)", {"x": (2, 4, 3), "s": (4,), "b": (4,)}, 21
    ),
    "GroupNormalization by groups": Case(
        "y = GroupNormalization<num_groups=2>(x, s, b)", {"x": (2, 4, 3), "s": (2,), "b": (2,)}, 18
    ),
    "LRN": Case("y = LRN<size=3, alpha=0.5>(x)", {"x": (1, 5, 2, 2)}),
    "LpNormalization": Case("y = LpNormalization<axis=1, p=1>(x)", {"x": X}),
    "MeanVarianceNormalization": Case("y = MeanVarianceNormalization<axes=[0, 2]>(x)", {"x": X}),
    "Dropout": Case("y, y1 = Dropout(x)", {"x": X}, out="float bool"),
    # losses
    **{
        f"NegativeLogLikelihoodLoss {r}": Case(
            f'y = NegativeLogLikelihoodLoss<reduction="{r}", ignore_index=1>(x, t, w)',
            {"x": (4, 3), "t": np.array([0, 1, 2, 2]), "w": POSITIVE[0, :, 0]},
        )
        for r in ("none", "mean", "sum")
    },
    "SoftmaxCrossEntropyLoss": Case(
        "y, y1 = SoftmaxCrossEntropyLoss(x, t)", {"x": (4, 3, 2), "t": np.array([[0, 1], [1, 1], [2, 2], [2, 0]])},
        out="float float",
    ),
    # sequences
    "SequenceConstruct": Case("s = SequenceConstruct(a, b) y = ConcatFromSequence<axis=0>(s)",
                              {"a": (1, 2), "b": (2, 2)}),
    "SplitToSequence": Case(
        "s = SplitToSequence<axis=1>(x) i = Constant<value = int64 {-1}>() y = SequenceAt(s, i) y1 = SequenceLength(s)",
        {"x": X}, out="float int64",
    ),
    "ConcatFromSequence": Case("s = SequenceConstruct(a, b) y = ConcatFromSequence<axis=0, new_axis=1>(s)",
                               {"a": (2, 2), "b": (2, 2)}),
    "SequenceInsert": Case(
        "e = SequenceEmpty() s = SequenceInsert(e, a) i = Constant<value = int64 {0}>() t = SequenceInsert(s, b, i) "
        "u = SequenceInsert(t, a) v = SequenceErase(u, i) w = SequenceInsert(v, b) y = ConcatFromSequence<axis=0>(w)",
        {"a": (1, 2), "b": (2, 2)},
    ),
    # recurrent layers
    **{
        f"{n} {d}": Case(
            f'y, y1 = {n}<hidden_size=5, direction="{d}">(x, w, r, b)',
            {"x": (4, 2, 3), "w": (k, g * 5, 3), "r": (k, g * 5, 5), "b": (k, g * 10)}, out="float float",
        )
        for n, g in (("LSTM", 4), ("GRU", 3), ("RNN", 1))
        for d, k in (("forward", 1), ("reverse", 1), ("bidirectional", 2))
    },
    "LSTM with states": Case(
        "y, , y1 = LSTM<hidden_size=5>(x, w, r, , , h, c)",
        {"x": (4, 2, 3), "w": (1, 20, 3), "r": (1, 20, 5), "h": (1, 2, 5), "c": (1, 2, 5)}, out="float float",
    ),
    "GRU as torch has it": Case(
        "y = GRU<hidden_size=5, linear_before_reset=1>(x, w, r, b, , h)",
        {"x": (4, 2, 3), "w": (1, 15, 3), "r": (1, 15, 5), "b": (1, 30), "h": (1, 2, 5)},
    ),
    "RNN with Relu": Case(
        'y = RNN<hidden_size=5, activations=["Relu"]>(x, w, r)', {"x": (4, 2, 3), "w": (1, 5, 3), "r": (1, 5, 5)}
    ),
}  # fmt: skip

ROWS = np.array([[0, 0, 0], [1, -2, 3]], np.float32)
LARGE = np.array([1, 1e8, np.inf, 2], np.float32)
TIES = np.random.default_rng(0).integers(0, 3, (4, 9)).astype(np.float32)
NOOP = ("ReduceSum", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")
WINDOW = "kernel_shape=[2,2], strides=[3,3], pads=[0,0,1,1], ceil_mode=1"
CASES |= {
    **{
        f"{n} over no axes, opset {o}": Case(f"y = {n}<noop_with_empty_axes=1>(x)", {"x": POSITIVE}, o, since=(1, 20))
        for n in NOOP
        for o in (18, 20)
    },
    "ReduceL1 over an empty list": Case(
        f"a = {_ints()} y = ReduceL1<noop_with_empty_axes=1>(x, a)", {"x": X}, 18, since=(1, 20)
    ),
    **{
        f"{n} of whole numbers": Case(f"y = {n}(x)", {"x": np.array([[1, 2, 3], [4, 5, 7]], np.int32)}, 18, "int32")
        for n in ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp")
    },
    "CumSum of large numbers": Case(
        "a = Constant<value = int64 {0}>() y = CumSum<exclusive=1>(x, a) y1 = CumSum<exclusive=1, reverse=1>(x, a)",
        {"x": LARGE}, out="float float",
    ),
    **{
        f"TopK of equals, largest={n}": Case(f"k = {_ints(4)} y, y1 = TopK<largest={n}>(x, k)", {"x": TIES},
                                             out="float int64")
        for n in (0, 1)
    },
    "LpPool with cut windows": Case(
        "y = LpPool<kernel_shape=[3,3], strides=[2,2], pads=[1,0,0,1], ceil_mode=1>(x)", {"x": IMAGE}, 19,
        since=(1, 20),
    ),
    "MaxPool with a window beyond the data": Case(f"y = MaxPool<{WINDOW}>(x)", {"x": IMAGE}, 19, since=(1, 20)),
    "AveragePool with a window beyond the data": Case(
        f"y = AveragePool<{WINDOW}>(x) y1 = AveragePool<count_include_pad=1, {WINDOW}>(x)", {"x": IMAGE}, 19,
        "float float", since=(1, 20),
    ),
    **{
        f"Slice from {start} to {end} by {step}": Case(
            f"s = {_ints(start)} e = {_ints(end)} a = {_ints(0)} t = {_ints(step)} y = Slice(x, s, e, a, t)",
            {"x": (5,)},
        )
        for start, end, step in ((99, 6, -1), (-10, -20, -1), (-3, -20, -2), (2**31, 1, -1), (3, -(2**31), -1))
    },
    "ConvTranspose to a larger shape": Case(
        "y = ConvTranspose<strides=[3,3], output_shape=[17,16]>(x, w, b)",
        {"x": (1, 3, 5, 5), "w": (3, 4, 3, 3), "b": (4,)},
    ),
    "Pow of a whole number by floats": Case(
        "b = Constant<value = int64 {3}>() y = Pow(b, x)", {"x": np.array([0.5, 2, 3.2], np.float32)}, out="int64"
    ),
    "Pow of a double by floats": Case("b = Constant<value = double {3.3}>() y = Pow(b, x)", {"x": X}, out="double"),
    "LpNormalization of zeros": Case("y = LpNormalization(x) y1 = LpNormalization<p=1>(x)", {"x": ROWS},
                                     out="float float"),
    **{
        f"Pad {mode} of all axes": Case(
            f'p = {_ints(1, 0, 2, 1, 0, 1, 1, 2)} y = Pad<mode="{mode}">(x, p)', {"x": (3, 3, 4, 5)}, 19
        )
        for mode in ("reflect", "edge", "wrap")
    },
    "Pad that cuts": Case(f'p = {_ints(-1, 0, 1, 2)} y = Pad<mode="reflect">(x, p)', {"x": (4, 5)}),
    "Gemm without an infinite term": Case(
        "y = Gemm<beta=0.0>(x, w, c)", {"x": (2, 3), "w": (3, 2), "c": np.array([np.inf, 1], np.float32)}
    ),
}  # fmt: skip

RESIZES = {
    "nearest": 'Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">',
    "nearest round": 'Resize<mode="nearest">',
    "nearest ceil": 'Resize<mode="nearest", nearest_mode="round_prefer_ceil">',
    "linear": 'Resize<mode="linear">',
    "corners": 'Resize<mode="linear", coordinate_transformation_mode="align_corners">',
    "asymmetric": 'Resize<mode="linear", coordinate_transformation_mode="asymmetric">',
    "torch": 'Resize<mode="linear", coordinate_transformation_mode="pytorch_half_pixel">',
    "cubic": 'Resize<mode="cubic">',
    "cubic corners": 'Resize<mode="cubic", coordinate_transformation_mode="align_corners">',
    "cubic -0.5": 'Resize<mode="cubic", cubic_coeff_a=-0.5>',
}
for _name, _node in RESIZES.items():
    _scales = "s = Constant<value = float[4] {1.0, 1.0, 2.0, 1.5}>()"
    CASES[f"Resize {_name} by scales"] = Case(f"{_scales} y = {_node}(x, , s)", {"x": IMAGE})
    CASES[f"Resize {_name} to sizes"] = Case(f"s = {_ints(2, 3, 4, 9)} y = {_node}(x, , , s)", {"x": IMAGE})

# positions that are whole numbers but for rounding, and sizes that stay the same
for _name, _x, _factors in (
    ('mode="nearest", nearest_mode="floor", coordinate_transformation_mode="half_pixel_symmetric"', (9, 5), (0.7, 0.6)),
    ('mode="nearest", nearest_mode="ceil", coordinate_transformation_mode="half_pixel_symmetric"', (7, 9), (2.3, 1.4)),
    ('mode="linear", coordinate_transformation_mode="asymmetric"', (2, 3), (1.4, 1.3)),
    ('mode="linear", coordinate_transformation_mode="half_pixel"', (2, 3), (1.4, 2.0)),
):  # fmt: skip
    _scales = f"s = Constant<value = float[4] {{1.0, 1.0, {_factors[0]}, {_factors[1]}}}>()"
    CASES[f"Resize {_name}"] = Case(f"{_scales} y = Resize<{_name}>(x, , s)", {"x": (1, 2, *_x)}, 19)

_AXES = RESIZES | {
    f"{m} {c}, antialias {s}, exclude_outside {o}": f'Resize<mode="{m}", {k} antialias={s}, exclude_outside={o}>'
    for m, c, k in (("linear", "", ""), ("cubic", "", ""), ("cubic", "-0.5", "cubic_coeff_a=-0.5,"))
    for s, o in ((1, 0), (1, 1), (0, 1))
    if s or m == "cubic"
}
for _name, _node in _AXES.items():
    # products with a size that are whole numbers in float32 only, and positions that are; the weights of neighbours
    # have as few digits as the positions
    for _factors in ((0.7, 0.35), (2.3, 0.6), (0.6, 1.7), (3.0, 0.05)):
        _scales = f"s = Constant<value = float[4] {{1.0, 1.0, {_factors[0]}, {_factors[1]}}}>()"
        CASES[f"Resize {_name} by {_factors}"] = Case(
            f"{_scales} y = {_node}(x, , s)", {"x": (1, 2, 10, 20)}, 18, atol=1e-5
        )
    CASES[f"Resize {_name} to fewer"] = Case(
        f"s = {_ints(1, 2, 6, 13)} y = {_node}(x, , , s)", {"x": (1, 2, 10, 20)}, 18, atol=1e-5
    )

# operators of opsets that ONNX Runtime 1.19 does not know
_HEADS, _FLAT = (2, 4, 3, 6), (2, 3, 24)
_QKV = {"q": _HEADS, "k": (2, 4, 5, 6), "v": (2, 4, 5, 6)}
_FEW = {"q": _HEADS, "k": (2, 2, 5, 6), "v": (2, 2, 5, 6)}
_PAST = {"pk": (2, 4, 2, 6), "pv": (2, 4, 2, 6)}
_SEEN = np.random.default_rng(1).random((2, 1, 3, 5)) < 0.6
_SEEN[0, 0, 1] = False
_ANGLES = {"c": (2, 3, 3), "s": (2, 3, 3)}
_PLACES = {"c": (7, 3), "s": (7, 3), "p": np.array([[0, 1, 2], [4, 5, 6]])}
LATER = {
    "Swish": Case("y = Swish(x) y1 = Swish<alpha=1.7>(x)", {"x": X}, 24, "float float", (1, 25)),
    "RMSNormalization": Case(
        "y = RMSNormalization<axis=1, epsilon=0.01>(x, s) y1 = RMSNormalization(x, t)",
        {"x": X, "s": (3, 4), "t": (1,)}, 23, "float float", (1, 23),
    ),
    "Attention": Case("y = Attention(q, k, v)", _QKV, 23, since=(1, 23)),
    "Attention, causal": Case("y = Attention<is_causal=1, scale=0.3>(q, k, v)", _QKV, 23, since=(1, 23)),
    "Attention of fewer heads": Case(
        "y = Attention(q, k, v, m)", {**_FEW, "m": (3, 5)}, 23, since=(1, 23)
    ),
    "Attention that sees nothing": Case("y = Attention(q, k, v, m)", {**_QKV, "m": _SEEN}, 23, since=(1, 25)),
    "Attention with a cap": Case(
        "y, , , y1 = Attention<softcap=0.7, qk_matmul_output_mode=1, softmax_precision=1>(q, k, v)",
        _QKV, 23, "float float", (1, 25),
    ),
    **{
        f"Attention with a past, output {mode}": Case(
            f"y, y1, y2, y3 = Attention<is_causal=1, qk_matmul_output_mode={mode}>(q, k, v, m, pk, pv)",
            {**_QKV, **_PAST, "m": (3, 7)}, 23, "float float float float", (1, 25),
        )
        for mode in (0, 1, 3)
    },
    "Attention without heads": Case(
        "y = Attention<q_num_heads=4, kv_num_heads=2>(q, k, v)",
        {"q": _FLAT, "k": (2, 5, 12), "v": (2, 5, 8)}, 23, since=(1, 23),
    ),
    "Attention with padding": Case(
        "y = Attention<is_causal=1>(q, k, v, , , , n)", {**_QKV, "n": np.array([5, 3])}, 24, since=(1, 25)
    ),
    **{
        f"RotaryEmbedding, interleaved={n}": Case(
            f"y = RotaryEmbedding<interleaved={n}>(x, c, s)", {"x": _HEADS, **_ANGLES}, 23, since=(1, 23)
        )
        for n in (0, 1)
    },
    **{
        f"RotaryEmbedding of places, interleaved={n}": Case(
            f"y = RotaryEmbedding<num_heads=3, rotary_embedding_dim=6, interleaved={n}>(x, c, s, p)",
            {"x": _FLAT, **_PLACES}, 23, since=(1, 23),
        )
        for n in (0, 1)
    },
}  # fmt: skip
CASES |= LATER
# ONNX Runtime 1.32 refuses the one, and has the lowest number in the place of -inf in the other
LATER |= {
    "Attention with a shorter mask": Case("y = Attention(q, k, v, m)", {**_QKV, "m": _SEEN[..., :3]}, 24),
    "Attention with a past, output 2": Case(
        "y, , , y1 = Attention<is_causal=1, qk_matmul_output_mode=2>(q, k, v, m, pk, pv)",
        {**_QKV, **_PAST, "m": (3, 7)}, 23, "float float",
    ),
}  # fmt: skip

RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli"}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_operator_computes_what_onnx_runtime_computes(case: Case) -> None:
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < case.since:
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} does not follow the specification here")
    model, arrays = case.model(), case.arrays()
    session = onnxruntime.InferenceSession(model.SerializeToString(), OPTIONS, providers=["CPUExecutionProvider"])
    expected = session.run(None, arrays)
    results = to_torch(model)(*[torch.from_numpy(a) for a in arrays.values()])
    for result, value in zip(results, expected, strict=True):
        found = result.detach().numpy()
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=case.atol)


@pytest.mark.parametrize("case", LATER.values(), ids=LATER.keys())
def test_operators_of_later_opsets_compute_what_the_reference_computes(case: Case) -> None:
    model, arrays = case.model(), case.arrays()
    expected = onnx.reference.ReferenceEvaluator(model).run(None, arrays)
    for result, value in zip(to_torch(model)(*[torch.from_numpy(a) for a in arrays.values()]), expected, strict=True):
        np.testing.assert_allclose(result.numpy(), value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("body", "inputs", "message"),
    [
        ("y = Attention<kv_num_heads=4>(q, q, q)", {"q": _FLAT}, r"Attention \(node 'y'\): .* attribute q_num_heads"),
        ("y = Attention<q_num_heads=4>(q, q, q)", {"q": _FLAT}, r"three dimensions needs the attribute kv_num_heads"),
        ("y = Attention(q, q, q, , p)", {"q": _HEADS, "p": _PAST["pk"]}, "one of past_key and past_value"),
        ("y = RotaryEmbedding(x, c, s)", {"x": _FLAT, **_ANGLES}, r"RotaryEmbedding .* needs the attribute num_heads"),
    ],
)
def test_attention_that_is_not_told_whole_is_refused(body: str, inputs: dict[str, Any], message: str) -> None:
    case = Case(body, inputs, 23)
    with pytest.raises(UnsupportedError, match=message):
        to_torch(case.model())(*[torch.from_numpy(a) for a in case.arrays().values()])


GRADIENTS: dict[str, tuple[str, Any]] = {
    "y = ReduceL1<noop_with_empty_axes=1>(x)": ("x.abs()", X),
    "y = ReduceSumSquare<noop_with_empty_axes=1>(x)": ("x * x", X),
    "a = Constant<value = int64 {0}>() y = CumSum<exclusive=1>(x, a)": (
        "torch.cat([torch.zeros(1, 3, 4), x[:-1]]).cumsum(0)", X,
    ),
    f"k = {_ints(4)} y, i = TopK(x, k)": ("x.sort(stable=True, descending=True).values[:, :4]", TIES),
    "y = LpPool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1>(x)": (
        "F.lp_pool2d(F.pad(x.abs(), [0, 0, 0, 1]), 2, 2)", IMAGE,
    ),
    "s = Constant<value = float {0.25}>() y = PRelu(x, s)": ("F.prelu(x, torch.tensor([0.25]))", ROWS),
    "y = LpNormalization(x)": ("F.normalize(x)", X[1:]),
}  # fmt: skip


@pytest.mark.parametrize("body", GRADIENTS)
def test_gradients_are_those_of_the_expression_in_torch(body: str) -> None:
    expression, value = GRADIENTS[body]
    case = Case(body, {"x": value}, 18)
    (array,) = case.arrays().values()
    x = torch.from_numpy(array).requires_grad_()
    y = eval(expression, {"torch": torch, "F": F, "x": x})
    weights = torch.rand(y.shape)
    (y * weights).sum().backward()
    builder = GradientGraphBuilder(case.model(), ["y"], ["x"], "")
    builder.build(verify=True)
    session = onnxruntime.InferenceSession(builder.get_model(), OPTIONS, providers=["CPUExecutionProvider"])
    got, gradient = session.run(["y", "x_grad"], {"x": array, "y_grad": weights.numpy()})
    np.testing.assert_allclose(got, y.detach().numpy(), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=2e-5, atol=2e-6)


def test_every_operator_of_the_table_has_a_case() -> None:
    seen = {(n.domain, n.op_type) for case in CASES.values() for n in case.model().graph.node}
    missing = set(OPERATORS) - seen - {("", name) for name in RANDOM}
    missing -= {("com.microsoft", "ReduceAllL2")}  # no build for inference has it; it is tested as an onnxblock
    assert not missing
    assert ("", "Identity") in seen and STRUCTURE - set(CONTROL_FLOW) <= {name for _, name in seen}


def test_the_page_lists_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "onnx-reader.md").read_text()
    listed = set(re.findall(r"`(\w+)`", page[page.index("## Operators") :]))
    assert listed - {"Constant", "Identity", "com", *CONTROL_FLOW} == {name for _, name in OPERATORS}


@pytest.mark.parametrize(
    ("body", "mean", "deviation"),
    [
        ("y = RandomNormal<shape=[4000], mean=2.0, scale=3.0>()", 2, 3),
        ("y = RandomUniform<shape=[4000], low=1.0, high=3.0>()", 2, 3**-0.5),
        ("y = RandomNormalLike<mean=2.0, scale=3.0>(x)", 2, 3),
        ("y = RandomUniformLike<low=1.0, high=3.0>(x)", 2, 3**-0.5),
        ("h = HardSigmoid<alpha=0.0, beta=0.25>(x) y = Bernoulli(h)", 0.25, 0.433),
    ],
)
def test_random_numbers_have_the_distribution_and_follow_torchs_seed(body: str, mean: float, deviation: float) -> None:
    module = to_torch(Case(body, {"x": (4000,)}, 15).model())
    torch.manual_seed(1)
    (first,) = module(torch.zeros(4000))
    torch.manual_seed(1)
    (again,) = module(torch.zeros(4000))
    assert torch.equal(first, again)
    assert first.mean().item() == pytest.approx(mean, abs=0.2)
    assert first.std().item() == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize("operator", ["Conv<{}>(x, w)", "MaxPool<kernel_shape=[2], {}>(x)"])
def test_strides_that_leave_out_more_than_one_element_have_no_automatic_padding(operator: str) -> None:
    text = operator.format('auto_pad="SAME_UPPER", strides=[4]')
    model = Case(f"y = {text}", {"x": (1, 1, 7), "w": (1, 1, 2)}).model()
    module = to_torch(model)
    weight = torch.randn(1, 1, 2)
    with pytest.raises(UnsupportedError, match=r"stride of 4 over windows of 2 .* at a size of 8, .* give pads"):
        module(torch.zeros(1, 1, 8), weight)
    assert module(torch.zeros(1, 1, 7), weight)[0].shape == (1, 1, 2)
