//! The user's terminal: raw while a command runs on it, restored whatever happens.

use jiffy_wire::agent::WindowSize;
use rustix::termios::{
    OptionalActions, Termios, isatty, tcgetattr, tcgetpgrp, tcgetwinsize, tcsetattr,
};
use std::sync::Mutex;

/// How the terminal was before it became raw.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Whether stdin and stdout are terminals and this process may use them.
pub fn foreground_terminals() -> bool {
    let stdin = rustix::stdio::stdin();
    isatty(stdin)
        && isatty(rustix::stdio::stdout())
        // A background job that touches the terminal's settings is stopped.
        && tcgetpgrp(stdin).is_ok_and(|group| group == rustix::process::getpgrp())
}

/// Whether stdin is a terminal.
pub fn on_terminal() -> bool {
    isatty(rustix::stdio::stdin())
}

/// The terminal's size, from whichever of the three is one.
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

/// Makes the terminal on stdin raw; false when there is none. [`restore`]
/// undoes it, also from a panic.
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

/// Makes the terminal raw again, after a stop from outside.
pub fn make_raw_again() {
    if let Ok(mut raw) = tcgetattr(rustix::stdio::stdin()) {
        raw.make_raw();
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Now, &raw);
    }
}

/// Puts the terminal back as it was; does nothing the second time.
pub fn restore() {
    // A lock held by a panicking thread is not worth a hang.
    if let Ok(mut saved) = BEFORE.try_lock()
        && let Some(before) = saved.take()
    {
        let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Drain, &before);
    }
}
