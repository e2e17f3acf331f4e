// Records the blocks that operators read outside of modules, backward passes and optimizers' steps:
// a loss reads its target, a normalisation the raw images. RecordFunction collects an operator's
// arguments only if a callback wants them. Here one thread's callback does, between two calls of a
// model.
//
// A read is a label without a category (unknown), in the operator's scope. An operator with a graph
// has "used" its arguments that need no gradient. An operator that makes a block has "read" its
// arguments.
#pragma once

namespace pytracer::reads {

// Begins or pauses on the calling thread. Doing either twice is harmless. It pauses for a call of
// this outermost module, or for something longer.
void listen();
void pause(const void* module = nullptr);
// Removes it from the calling thread. Other threads remove it at their next operator.
void forget();

// Once, as recording begins and ends: has torch leave us out where `Outermost` in reads.cpp says.
// Without it all is recorded as well, at a higher price.
void leave_out_inner_operators(bool on);

}  // namespace pytracer::reads
