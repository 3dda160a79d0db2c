"""The sparse product of few rows, microseconds. Run in a tree, before or after the change: cd TREE && python3 PATH/time_sparse.py [ROWS ...].

alone:  product after product in a graph, each with weights of its own (more than the L2 cache holds) and the same h, as it comes from the cache in a step.
        "floor" is what the weights of active units take at 4.2 TB/s; "dense" the tiled product of all weights.
chain:  layers of key product (its h is relu squared, 10% active), value product with `ahead` = r, k, v of the next layer, norm and mix, r k v product: what the
        value product and what the norm makes of its parts take of a step. "less dense" is the same chain with the tiled product and norm of y subtracted
        (negative: the sparse one is faster), in microseconds per layer.
"""
import os, sys
from statistics import median
import torch
sys.path.insert(0, ".")
from rwkv_batch.ops.cuda_lib import IDENTITY, RELU_SQUARE, Added, Kernels
dev = torch.device("cuda")
kernels = Kernels(dev)
torch.manual_seed(3)
half = lambda *s, std=1.0, mean=0.0: torch.empty(s, device=dev, dtype=torch.float16).normal_(mean, std)


def graph(f):
    f(); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): f()
    return g


def us(g, each):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record(); g.replay(); b.record(); b.synchronize()
    return a.elapsed_time(b) * 1e3 / each


def sparse(h, w, room, ahead=None):
    parts = kernels.product_sparse(h, w, room, ahead)
    return room if parts is None else parts  # before the change: every slice there is room for


def size(name, C, layers, chained, all_rows):
    K = 4 * C
    value = [half(K, C, std=K ** -.5) for _ in range(layers)]
    key = [half(K, C, std=C ** -.5, mean=-2.866 / C) for _ in range(chained)]  # of x with mean 1/2: 1.28 deviations below zero
    rkv_w = [half(3, C, C, std=C ** -.5) for _ in range(chained)]
    weight, bias = half(C, std=.1, mean=1), half(C, std=.1)
    for rows in all_rows:
        room = torch.zeros(8 if hasattr(kernels, "sparse_parts") else max(1, 128 // (C // 128)), rows, C, device=dev)
        out, y = torch.empty(6, rows, C, device=dev, dtype=torch.float16), torch.empty(rows, C, device=dev, dtype=torch.float16)
        x, mixed, hidden, rkv = torch.randn(rows, C, device=dev), half(rows, C, mean=.5), half(rows, K), half(3, rows, C)
        shift, slots, mixes = half(rows, C), torch.arange(rows, device=dev, dtype=torch.int32), half(6, C)
        h = (torch.rand(rows, K, device=dev) - .9).relu().half()
        active = float(h.any(0).float().mean())
        want = h.double() @ value[0].double()
        got = sparse(h, value[0], room)
        error, count = float((got.sum(0).double() - want).norm() / want.norm()), len(got)
        first = sparse(h, value[0], room).clone()
        same = all(torch.equal(first, sparse(h, value[0], room)) for _ in range(5))

        def chain(dense):
            for l in range(chained):
                kernels.products([(key[l], mixed, hidden, RELU_SQUARE)])
                if dense:
                    kernels.products_tile([value[l]], [hidden], [y], across=True)
                    added = Added(y=y)
                else:
                    added = Added(parts=sparse(hidden, value[l], room, rkv_w[(l + 1) % chained]))
                kernels.norm_mix(x, added, weight, bias, slots, shift, mixes, out)
                kernels.products([(rkv_w[(l + 1) % chained][i], out[i], rkv[i], IDENTITY) for i in range(3)])

        graphs = {"alone": (graph(lambda: [sparse(h, w, room) for w in value]), layers),
                  "dense": (graph(lambda: [kernels.products_tile([w], [h], [y], across=True) for w in value]), layers),
                  "chain": (graph(lambda: chain(False)), chained), "chain dense": (graph(lambda: chain(True)), chained)}
        times = {n: [] for n in graphs}
        for i in range(23):
            for n, (g, each) in graphs.items():
                t = us(g, each)
                if i > 2: times[n].append(t)
            x.normal_()
        t = {n: median(of) for n, of in times.items()}
        share = float((hidden != 0).any(0).float().mean())
        print(f"{name} rows {rows}: alone {t['alone']:6.2f} us (floor {active * K * C * 2 / 4.2e6:5.2f}, dense {t['dense']:6.2f}, best {min(times['alone']):6.2f}) | "
              f"chain {t['chain']:7.2f} less dense {median(a - b for a, b in zip(times['chain'], times['chain dense'])):7.2f} (active {share:.2f}, alone {active:.2f})"
              f"  parts {count} error {error:.1e}{'' if error < 2e-5 and same else '  WRONG'}", flush=True)


rows = [int(a) for a in sys.argv[1:]] or [1, 2, 4, 8]
size("7.2B", 4096, 10, 3, rows)
size("1.5B", 2048, 20, 8, rows)
