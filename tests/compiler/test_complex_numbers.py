"""Complex numbers, which run in torch: conjugates and negative parts, which torch notes and does not compute."""

from __future__ import annotations

import pytest
import torch


def broken(x):
    torch._dynamo.graph_break()
    return x


def several(z):
    w = z * 2
    return w, w.conj(), w.conj().imag, w.real


OF_COMPLEX = {
    "conjugate": lambda z: z.conj(),
    "transposed": lambda z: z.mH,
    "negative part": lambda z: z.conj().imag,
    "several": several,
    "gradient as it comes": lambda z: z + 1,
    "multiplied up": lambda z: (z.prod(1), z[0].prod()),
    "windows": lambda z: torch.nn.functional.unfold(z.reshape(1, 1, 3, 4), (2, 2)),
    "constants that are no numbers": lambda z: torch.logaddexp(z, z.detach() * 2),
    "loss": lambda z: (z.conj() * z).real.sum() + z.conj().imag.sin().sum(),
    "broken": lambda z: (broken(z.conj()) * z).abs(),
    "negative, broken": lambda z: broken((z * 2).conj().imag).square(),
    "resolved": lambda z: torch.view_as_real(broken(z.conj()).resolve_conj()).square(),
}
OF_REAL = {
    "made": lambda x: torch.complex(x, x * 2).conj(),
    "product": lambda x: (torch.complex(x, x * 2).conj() * torch.complex(x, x)).real,
    "part": lambda x: torch.complex(x, x * 2).conj().imag,
    "seen as": lambda x: torch.view_as_complex(x.view(3, 2, 2)).conj(),
    "matrices": lambda x: torch.complex(x, x * 2).mH @ torch.complex(x, x),
    "with a number": lambda x: (x + 1j * x).abs(),
    "transformed": lambda x: torch.fft.irfft(torch.fft.rfft(x).conj(), n=4),
}
CASES = [("complex", name) for name in OF_COMPLEX] + [("real", name) for name in OF_REAL]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_conjugates(kind, name, verify):
    function = OF_COMPLEX[name] if kind == "complex" else OF_REAL[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=generator, dtype=torch.complex64 if kind == "complex" else torch.float32)
    found = []
    for step in (function, torch.compile(function, backend="lightning_ort", options={"verify": verify})):
        leaf = x.clone().requires_grad_()
        results = step(leaf)
        results = results if isinstance(results, tuple) else (results,)
        sum((r.abs() if r.is_complex() else r).sum() for r in results).backward()
        found.append([t.detach().resolve_conj().resolve_neg() for t in (*results, leaf.grad)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
