// The clusters of primitives.cuh where there are none: a block is alone.
#pragma once

#define CLUSTERS 0

DEVICE int cluster_block() { return 0; }
DEVICE int cluster_blocks() { return 1; }
DEVICE void cluster_begin() {}
DEVICE void cluster_wait_for_all() {}
DEVICE void cluster_sync() {}

template <typename T>
DEVICE T* cluster_shared(T* place, int) {
    return place;
}
