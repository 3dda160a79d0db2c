import sys, statistics, torch
sys.path.insert(0, ".")
from rwkv_batch.ops.cuda_lib import Kernels, TimeMixInput, PENDING
from rwkv_batch.ops import cuda_lib
LATE = getattr(cuda_lib, 'LATE', 1)
k = Kernels(torch.device("cuda")); L = 4
names = ("r","k","v","w","a","mix","g","v_first","w0","a0","v0","k_k","k_a","r_k","norm_weight","norm_bias")
for heads, all_rows in ((64, (1, 64, 128, 320, 960)), (32, (128, 320, 960))):
    for rows in all_rows:
        slots = torch.arange(rows, device="cuda", dtype=torch.int32)
        t = {n: torch.randn(rows, heads * 64, device="cuda").half() for n in names}
        layers = L if rows > 32 else 32
        st = torch.randn(rows, layers, heads, 64, 64, device="cuda", dtype=torch.float16); pe = torch.randn(rows, layers, heads, LATE * PENDING, 64, device="cuda").half() * .1
        out = torch.empty(rows, heads * 64, device="cuda", dtype=torch.float16); work = torch.zeros(1, device="cuda", dtype=torch.int32)
        res = []
        for behind in (*(torch.full((rows,), i, dtype=torch.int32) for i in range(LATE + 1)), torch.arange(rows, dtype=torch.int32) % (LATE + 1)):
            b = behind.cuda()
            def run():
                for l in range(layers):
                    k.wkv_step(TimeMixInput(**{n: x.data_ptr() for n, x in t.items()}, out=out.data_ptr(), state=st[:, l].data_ptr(), slot_stride=st.stride(0), width=heads * 64,
                        work=work.data_ptr(), pending=pe[:, l].data_ptr(), pending_stride=pe.stride(0), behind=b.data_ptr()), slots, False)
            run(); torch.cuda.synchronize(); g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g): run()
            ts = []
            for i in range(12):
                e, f = torch.cuda.Event(True), torch.cuda.Event(True); e.record(); g.replay(); f.record(); f.synchronize(); ts.append(e.elapsed_time(f) * 1e3 / layers)
            res.append(statistics.median(ts[2:]))
        print(f"{heads} heads {rows:4d} rows: " + " ".join(f"{r:7.2f}" for r in res[:-1]) + f"  mean {sum(res[:-1]) / (LATE + 1):7.2f}  mixed {res[-1]:7.2f}", flush=True)
        del st, pe
