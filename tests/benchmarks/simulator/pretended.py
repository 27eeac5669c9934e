"""Small models on pretended meshes, for laws of our plan and of other libraries' schemes."""

import torch
from hypothesis import strategies as st

from benchmarks.simulator.mesh import Mesh, Setting
from benchmarks.simulator.models import Kind, Model


def setting(mesh: Mesh, shapes: list[tuple[int, int]], experts: int = 0) -> Setting:
    kinds = [Kind(f"matrix {i}", shape, 1, muon=True) for i, shape in enumerate(shapes)]
    kinds += [Kind("experts", (16, 48), experts, muon=True, experts=True)] if experts else []
    small = Model("small", "made up", (*kinds, Kind("embedding", (7, 3), 1, muon=False)))
    return Setting(small, mesh, "cpu", torch.float32)


MESHES = st.builds(
    lambda dp, part, ep, tp: Mesh(dp, part * ep, tp, ep),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 2),
).filter(lambda mesh: mesh.pieces > 1)
SETTINGS = st.builds(
    setting,
    MESHES,
    st.lists(st.tuples(st.sampled_from([16, 32]), st.sampled_from([16, 48, 64])), min_size=1, max_size=5),
    st.integers(0, 5),
)
