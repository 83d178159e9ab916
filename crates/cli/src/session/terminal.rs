//! The user's terminal: raw while a command runs on it, restored whatever happens.

use jiffy_wire::agent::WindowSize;
use rustix::termios::{
    OptionalActions, Termios, isatty, tcgetattr, tcgetpgrp, tcgetwinsize, tcsetattr,
};
use std::sync::Mutex;

/// The terminal's settings before it became raw.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Whether stdin and stdout are terminals and this process may use them.
pub fn foreground_terminals() -> bool {
    let stdin = rustix::stdio::stdin();
    isatty(stdin)
        && isatty(rustix::stdio::stdout())
        // A background job that changes the terminal's settings is stopped.
        && tcgetpgrp(stdin).is_ok_and(|group| group == rustix::process::getpgrp())
}

/// Whether stdin is a terminal.
pub fn on_terminal() -> bool {
    isatty(rustix::stdio::stdin())
}

/// The terminal's size, from the first of stdin, stdout and stderr that is a terminal.
pub fn size() -> Option<WindowSize> {
    [
        rustix::stdio::stdout(),
        rustix::stdio::stdin(),
        rustix::stdio::stderr(),
    ]
    .into_iter()
    .find_map(|fd| tcgetwinsize(fd).ok())
    .filter(|size| size.ws_row > 0 && size.ws_col > 0)
    .map(|size| WindowSize {
        rows: size.ws_row,
        columns: size.ws_col,
    })
}

/// Makes the terminal on stdin raw; false if stdin is not a terminal. [`restore`] undoes it, also
/// after a panic.
pub fn make_raw() -> bool {
    let stdin = rustix::stdio::stdin();
    let Ok(before) = tcgetattr(stdin) else {
        return false;
    };
    let mut raw = before.clone();
    raw.make_raw();
    let Ok(mut saved) = BEFORE.lock() else {
        return false;
    };
    if saved.is_none() {
        // A panic in a release build ends the process without unwinding.
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            report(panic);
        }));
        *saved = Some(before);
    }
    tcsetattr(stdin, OptionalActions::Now, &raw).is_ok()
}

/// Makes the terminal raw again after the process was stopped and continued.
pub fn make_raw_again() {
    if let Ok(mut raw) = tcgetattr(rustix::stdio::stdin()) {
        raw.make_raw();
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &raw);
    }
}

/// Restores the terminal's settings; the second call does nothing.
pub fn restore() {
    // Does not wait for a lock that a panicking thread holds.
    if let Ok(mut saved) = BEFORE.try_lock()
        && let Some(before) = saved.take()
    {
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Drain, &before);
    }
}
