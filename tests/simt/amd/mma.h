// The device's own file over the emulated device.
#include "../../../csrc_hip/mma.h"
