//! End to end: the real binaries, real guests, a real KVM. All of it happens
//! in one machine that is booted once; the tests take turns.

mod crashes;
mod devices;
mod files;
mod leaks;
mod life;
mod machine;
mod refusals;
mod running;
mod streams;
mod support;
mod timelines;
