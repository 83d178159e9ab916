//! jiffy-init: the guest's PID 1 and agent.

fn main() {}
