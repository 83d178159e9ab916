//! `jiffy-init`: as PID 1 it boots the guest; with arguments it serves the
//! agent protocol as an ordinary process (`jiffy-init agent --help`).
#![no_std]
#![no_main]

mod freestanding;
