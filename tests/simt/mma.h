// mma.h on the host: CUDA's own file over emulated ldmatrix and mma.sync (vendor.h). AMD's is in amd/.
#pragma once

#include "../../csrc_cuda/mma.h"
