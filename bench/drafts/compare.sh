# Trees of several commits in turn, with the same choice of products. T: a folder with a tree (built: python -m rwkv_batch.ops.build) for each name.
#   T=... NAMES="main states wkv low" bash compare.sh
set -u
speed() { (cd $T/$1 && timeout 90 python3 bench/decode.py --size $2 --batches $3 --prefill "" 2>&1 | grep -a "^decode\|Error" | cut -c1-60 | sed "s/^/$1 $2 /"); }
copy() { for n in $NAMES; do [ $n = $1 ] || cp $T/$1/build/kernels/*/tuning-*.json $T/$n/build/kernels/*/; done; }
set -- $NAMES
for size in 7.2b 1.5b; do
    batches=64,128,320,512,960
    speed $1 $size $batches > /dev/null; copy $1   # tunes
    for round in 1 2; do for n in $NAMES; do speed $n $size $batches; done; done
done
