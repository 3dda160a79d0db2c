export PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1 PATH=/usr/local/cuda/bin:$PATH
exec > >(tee $OUT/all.txt) 2>&1
s() { echo "== $(date +%T) $*"; }
s build $(git rev-parse --short HEAD); (time python3 -m rwkv_batch.ops.build) 2>&1 | grep -v "file/s" | tail -4
s checkpoint; python3 bench/make_checkpoint.py --size 7.2b --device cuda /tmp/m7.2b.pth
nvidia-smi --query-gpu=timestamp,clocks.sm,power.draw,clocks_event_reasons.active --format=csv,noheader,nounits -lms 200 > $OUT/smi.txt & SMI=$!
s serve; timeout 230 python3 bench/serve_all.py --model-path /tmp/m7.2b.pth --json $OUT/serve.jsonl 2>&1 | grep -av "graph/s\|it/s" | cut -c1-300
B=1,8,32,64,128,320,512,960; P=1x1024,1x4096,8x512,32x128
s decode 7.2b; timeout 110 python3 bench/decode.py --size 7.2b --batches $B --prefill $P --json $OUT/decode72.json 2>&1 | grep -a "^decode\|^prefill\|copy\|Error"
s decode 1.5b; timeout 80 python3 bench/decode.py --size 1.5b --batches $B --prefill $P --json $OUT/decode15.json 2>&1 | grep -a "^decode\|^prefill\|copy\|Error"
kill $SMI
s memory; timeout 40 python3 -m pytest -q -p no:cacheprovider test/test_memory.py 2>&1 | tail -3
s tests; L=/tmp/logs; mkdir -p $L; T=${TESTS_S:-165}
t() { timeout $T python3 -m pytest -q -p no:cacheprovider $2 > $L/t_$1.txt 2>&1; echo "exit $?" >> $L/t_$1.txt; }
z() { timeout $T python3 bench/sanitize.py --run $2 -k "$3" > $L/z_$1.txt 2>&1; echo "exit $?" >> $L/z_$1.txt; }
t kernels "test/test_cuda_kernels.py test/test_cuda_lt.py test/test_cuda_weights.py test/test_cuda_low_rank.py test/test_cuda_tile.py" & J=$!
t models "test/test_cuda_model.py test/test_cuda_feed.py test/test_logprobs.py" & J="$J $!"
t proof "test/test_cuda_proof.py" & J="$J $!"
t soak "test/test_soak.py" & J="$J $!"
t rest "test/test_cuda_build.py test/test_cuda_capture.py test/test_cuda_prefill.py test/test_cuda_records.py test/test_cuda_sampler.py" & J="$J $!"
z mem1 memcheck "kernels or low_rank or records" & J="$J $!"
z mem2 memcheck "prefill or tile" & J="$J $!"
z mem3 memcheck "sampler" & J="$J $!"
z memm memcheck-models "only_the_slots or put_off" & J="$J $!"
z race1 racecheck "kernels or records" & J="$J $!"
z race2 racecheck "prefill" & J="$J $!"
z race3 racecheck "low_rank" & J="$J $!"
wait $J
for f in $L/*; do echo "-- $(basename $f)"; grep -aE "^E  |Error|FAILED|passed|failed|SUMMARY|^exit" $f | cut -c1-200 | tail -6; done
cp build/kernels/*/tuning* $L/; tar czf $OUT/logs.tgz -C /tmp logs
s done
