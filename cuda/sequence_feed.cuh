// What the device knows of the sequence in a slot. The host writes a record when a sequence begins there, the
// device from then on.
#pragma once

constexpr int STOPS = 13;  // ids that may end a sequence on the device

struct SequenceRecord {
    int last;          // the id drawn last
    int ended;         // 1: it was one of `stops`
    int lag;           // tokens that the fp16 state lags (wkv.cuh)
    int stops[STOPS];  // -1 for none
};
