//! `jiffy-init`: as PID 1 it boots the guest; with arguments it serves the
//! agent protocol as an ordinary process (`jiffy-init agent --help`).
#![cfg_attr(freestanding, no_std, no_main)]

#[cfg(freestanding)]
mod freestanding;

#[cfg(not(freestanding))]
fn main() {
    use std::os::unix::ffi::OsStringExt;
    std::panic::set_hook(Box::new(|info| {
        jiffy_guest::emergency(&info.to_string());
    }));
    let arguments: Vec<Vec<u8>> = std::env::args_os().map(OsStringExt::into_vec).collect();
    std::process::exit(jiffy_guest::start(arguments));
}
