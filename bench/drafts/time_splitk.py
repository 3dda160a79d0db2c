"""`value` and `out` with the norm that follows, us a layer: whole by each of cuBLASLt's algorithms, and in shares of K where the tree has them.
Graphs of some layers, each with weights of its own (from memory), the hidden units and what the product gives in the L2 cache, as in a step.
python3 time_splitk.py [WIDTHxROWS ...]; "alone" is the product without the norm."""
import sys
from functools import partial
from statistics import median
import torch
sys.path.insert(0, ".")
from rwkv_batch.ops import cuda_lt, cuda_products
from rwkv_batch.ops.cuda_lib import Added, Kernels
dev = torch.device("cuda")
kernels, lt = Kernels(dev), cuda_lt.of(dev)
SHARES = getattr(cuda_products, "SHARES", {})
shapes = [tuple(map(int, a.split("x"))) for a in sys.argv[1:]] or [(w, r) for w in (4096, 2048) for r in (128, 320, 512)]
half = lambda *s, std=1.0, mean=0.0: torch.empty(s, device=dev, dtype=torch.float16).normal_(mean, std)
stream = torch.cuda.Stream()


def graph(run):
    with torch.cuda.stream(stream): run()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g, stream=stream): run()
    return g


def seconds(g):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); g.replay(); b.record(); b.synchronize()
    return a.elapsed_time(b) * 1e3


made = {}
for width, rows in shapes:
    if width not in made:
        made.clear()
        layers = min(8, (1 << 28) // (4 * width * width))  # 4 layers of 134 MB, 8 of 34 MB
        made[width] = (half(layers, 4 * width, width, std=(4 * width) ** -0.5), half(layers, width, width, std=width ** -0.5),
                       half(layers, 6, width), half(layers, 2, width))
    value, out, mixes, affine = made[width]
    layers = len(value)
    hidden = (torch.rand(rows, 4 * width, device=dev) - 0.9).relu_().half() * 30
    read, x, y = half(rows, width), torch.randn(rows, width, device=dev), half(rows, width)
    parts = torch.empty(4, rows, width, device=dev)
    shift, slots, mixed = half(rows, layers, width), torch.randperm(rows, device=dev).to(torch.int32), half(6, rows, width)
    for kind, ws, h, count, across in (("value", value, hidden, 6, True), ("out", out, read, 1, False)):
        def run(number, shares, norm):
            to = parts[:shares] if shares else y
            for l in range(layers):
                lt.run(ws[l], h, to, number, across)
                if norm:
                    kernels.norm_mix(x, Added(parts=to) if shares else Added(y=to), affine[l, 0], affine[l, 1], slots, shift[:, l], mixes[l, :count],
                                     mixed[:count])
        def time(ways, norm):
            graphs = {name: graph(partial(run, *way, norm)) for name, way in ways}
            times = [{name: seconds(g) / layers for name, g in graphs.items()} for _ in range(9)][1:]
            return {name: median(t[name] for t in times) for name in graphs}
        k = h.shape[1]
        ways = {f"lt{i}": (i, 0) for i in range(lt.count(cuda_lt.Shape(1, width, rows, k, across)))}
        for name, (number, shares) in SHARES.items():
            if number < lt.count(cuda_lt.Shape(shares, width, rows, k // shares, across, True)): ways[name] = number, shares
        want, bad = h.double() @ (ws[0].double() if across else ws[0].double().T), ""
        for name, (number, shares) in ways.items():
            (parts if shares else y).fill_(float("nan"))
            lt.run(ws[0], h, parts[:shares] if shares else y, number, across)
            got = parts[:shares].double().sum(0) if shares else y.double()
            if not float((got - want).norm() / want.norm()) < 1e-3: bad += f" WRONG {name}"
        x.normal_()
        us = time(ways.items(), True)
        best = min((name for name, (_, shares) in ways.items() if not shares), key=us.get)
        first = min((name for name, (_, shares) in ways.items() if shares), key=us.get, default=best)
        alone = time([(name, ways[name]) for name in {best, first}], False)
        line = f"{kind:5} {width} rows {rows:3}: whole {best} {us[best]:6.2f} us (alone {alone[best]:6.2f})"
        if first != best:
            line += f", shares {first} {us[first]:6.2f} (alone {alone[first]:6.2f}), saved {us[best] - us[first]:5.2f}  | "
            line += " ".join(f"{name} {us[name]:.1f}" for name, (_, shares) in ways.items() if shares)
        print(line + bad, flush=True)
