// The bodies of the collective calls, once a Call has been entered.
#ifndef MOK_HOST_OPS_H_
#define MOK_HOST_OPS_H_

#include "call.h"

namespace mok {

void run_schedule(Call& call, MokScheduleArgs& args);
void run_dispatch(Call& call, const MokDispatchArgs& args);
void run_combine(Call& call, const MokCombineArgs& args);
void run_forward(Call& call, const MokForwardArgs& args);
void run_backward(Call& call, const MokBackwardArgs& args);

}  // namespace mok

#endif  // MOK_HOST_OPS_H_
