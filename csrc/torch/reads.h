// What the program's operators read outside of modules, backward passes and optimizers' steps: a
// loss its target, a normalisation the raw images. Torch asks for an operator's arguments only
// where somebody wants them; here that is one thread, between two calls of a model.
//
// A read is a label that says nothing of what the block is (category unknown), in the operator's
// scope. "used" is what an operator with a graph reads beside what needs gradients; "read" is
// what an operator reads that makes a block of its own.
#pragma once

namespace pytracer::reads {

// On the calling thread, from here on. Doing either twice is harmless.
void listen();
void pause();
// Nothing of it stays on the calling thread. On others it goes with their next operator.
void forget();

}  // namespace pytracer::reads
