//! jiffy: the command line.

fn main() {}
