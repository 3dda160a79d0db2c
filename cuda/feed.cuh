// The record of a slot, int32, which the host writes when a row begins in it and the device from then on.
#pragma once

constexpr int STOPS = 13;  // ids that may end a row
enum { LAST, ENDED, BEHIND, FIRST_STOP, ROW = FIRST_STOP + STOPS };
