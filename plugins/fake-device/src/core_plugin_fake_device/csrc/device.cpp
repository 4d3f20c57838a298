// The library: every file but autocast.cpp, in one translation unit, as most of the time that a
// compiler takes goes into torch's headers.

#include "control.h"
#include "ddp_timer.h"
#include "guard.h"
#include "hooks.h"
#include "kernels.h"
