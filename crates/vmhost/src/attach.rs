//! A client of the first command: its output from the start, and its input.

use crate::clients::Cursor;
use crate::frames::{self, FrameReader};
use crate::handle::{Command, View, VmHandle};
use crate::log::{Kind, Reader};
use jiffy_content::model::vm::{MainEnd, MainState};
use jiffy_wire::agent::{ExecInput, ExecOutput, Stream};
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;
use tracing::debug;

/// How long a client has to close after the last message. Until then its input is read and
/// dropped: closing a TCP connection with unread input would reset it, and the client could lose
/// the last message.
const LINGER: Duration = Duration::from_secs(2);

/// What a client of the first command does beside reading its output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It writes the command's input, which ends when it leaves.
    Writes,
    /// It sends no input, and the command's input outlives it.
    Watches,
}

/// Serves one client until the command has ended or the client disconnects.
pub async fn serve<S>(stream: S, vm: &VmHandle, folder: &Path, cursor: Cursor, role: Role)
where
    S: AsyncRead + AsyncWrite,
{
    let (input, mut output) = tokio::io::split(stream);
    let mut input = FrameReader::new(input);
    let told = tokio::select! {
        told = send_output(&mut output, vm, folder, &cursor) => Some(told),
        () = take_input(&mut input, vm) => None,
    };
    drop(cursor);
    match told {
        Some(Ok(())) => return close(input.into_inner(), output).await,
        Some(Err(error)) => {
            debug!(vm = %vm.name, %error, "an attached client disconnected");
        }
        None => {}
    }
    if role == Role::Writes {
        end_input(vm).await;
    }
}

/// Shuts down the writing half, and drops remaining input.
pub async fn close(mut input: impl AsyncRead + Unpin, mut output: impl AsyncWrite + Unpin) {
    let _ = timeout(LINGER, async {
        let _ = output.shutdown().await;
        let mut rest = vec![0; 16 * 1024];
        while matches!(input.read(&mut rest).await, Ok(got) if got > 0) {}
    })
    .await;
}

/// The client that wrote the input left before the command ended. A command with piped input gets
/// end of file; one on a terminal continues.
async fn end_input(vm: &VmHandle) {
    let reads = vm
        .spec
        .command
        .as_ref()
        .is_some_and(|command| command.stdin && command.tty.is_none());
    if reads {
        let _ = send(vm, ExecInput::StdinClosed).await;
    }
}

/// Sends `Started`, the output, and how the command ended.
async fn send_output(
    output: &mut (impl AsyncWrite + Unpin),
    vm: &VmHandle,
    folder: &Path,
    cursor: &Cursor,
) -> io::Result<()> {
    let mut view = vm.view.clone();
    let mut log_end = vm.log_end.clone();
    let mut reader = Reader::new(folder, view.borrow().log_start);
    cursor.advance(reader.position());
    let mut started = false;
    let mut held_up = false;
    loop {
        // The view is read before the log, so that when it shows the command's end, the log is
        // complete.
        let seen = view.borrow_and_update().clone();
        log_end.mark_unchanged();
        let end = vm.end_of_log(seen.lives(), folder)?;
        if !started && let Some(pid) = seen.main_pid {
            started = true;
            frames::write(output, &ExecOutput::Started { pid }).await?;
        }
        send_log(output, &mut reader, end, cursor).await?;
        if let MainState::Ended(how) = &seen.main {
            return frames::write(output, &last_message(how)).await;
        }
        if seen.removed || !seen.lives() {
            return frames::write(output, &lost_message(&seen)).await;
        }
        if let Some(why) = seen.held_up.filter(|_| !held_up) {
            let data =
                format!("jiffy: {why} The output waits until it can be stored.\n").into_bytes();
            let stream = Stream::Stderr;
            frames::write(output, &ExecOutput::Output { stream, data }).await?;
            held_up = true;
        }
        tokio::select! {
            changed = view.changed() => {
                if changed.is_err() {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
            }
            _ = log_end.changed() => {}
        }
    }
}

async fn send_log(
    output: &mut (impl AsyncWrite + Unpin),
    reader: &mut Reader,
    end: u64,
    cursor: &Cursor,
) -> io::Result<()> {
    loop {
        let batch = reader.batch(end)?;
        let dropped = reader.take_dropped();
        if dropped > 0 {
            let data = format!("jiffy: {dropped} bytes of older output were dropped.\n");
            let note = ExecOutput::Output {
                stream: Stream::Stderr,
                data: data.into_bytes(),
            };
            frames::write(output, &note).await?;
        }
        if batch.is_empty() {
            return Ok(());
        }
        for record in batch {
            if let Kind::Output(stream) = record.kind {
                let data = record.data;
                frames::write(output, &ExecOutput::Output { stream, data }).await?;
            }
        }
        cursor.advance(reader.position());
    }
}

fn last_message(how: &MainEnd) -> ExecOutput {
    match how {
        MainEnd::Exited(status) => ExecOutput::Exited(*status),
        MainEnd::Failed(error) => ExecOutput::Failed(error.clone()),
        MainEnd::Lost(failure) => ExecOutput::Lost {
            message: failure.message.clone(),
            hint: failure.hint.clone(),
        },
    }
}

fn lost_message(view: &View) -> ExecOutput {
    ExecOutput::Lost {
        message: match &view.failure {
            Some(failure) => failure.message.clone(),
            None => format!("The VM {} ended before its command did.", view.vm.name),
        },
        hint: view
            .failure
            .as_ref()
            .and_then(|failure| failure.hint.clone()),
    }
}

/// Forwards input; returns when the client has left or sent an invalid message.
async fn take_input(input: &mut FrameReader<impl AsyncRead + Unpin>, vm: &VmHandle) {
    let mut view = vm.view.clone();
    let mut runs = async || {
        let _ = view.wait_for(|view| view.main != MainState::Pending).await;
    };
    // An early window size is kept until the command runs; later messages may end the VM.
    let mut size = None;
    loop {
        let message = tokio::select! {
            biased;
            () = runs(), if size.is_some() => {
                if let Some(size) = size.take() {
                    send(vm, size).await;
                }
                continue;
            }
            message = input.next::<ExecInput>() => message,
        };
        let message = match message {
            Ok(Some(message)) => message,
            Ok(None) => return,
            Err(error) => {
                debug!(vm = %vm.name, %error, "an attached client sent an invalid message");
                return;
            }
        };
        let pending = vm.view.borrow().main == MainState::Pending;
        if let ExecInput::Signal(signal @ (1 | 2 | 3 | 15)) = message
            && pending
        {
            vm.tell(Command::Interrupt(signal)).await;
            continue;
        }
        if pending && matches!(message, ExecInput::Resize(_)) {
            size = Some(message);
            continue;
        }
        send(vm, message).await;
    }
}

/// Forwards input to the command, when it runs; drops it when it has ended.
async fn send(vm: &VmHandle, message: ExecInput) {
    let mut input = vm.input.clone();
    let mut view = vm.view.clone();
    let over = async {
        let _ = view
            .wait_for(|view| view.removed || matches!(view.main, MainState::Ended(_)))
            .await;
    };
    let forward = async {
        loop {
            let port = match input.wait_for(Option::is_some).await {
                Ok(port) => port.clone(),
                Err(_) => return,
            };
            // If the connection breaks meanwhile, the message is sent on the next one.
            if let Some(port) = port
                && port.send(message.clone()).await
            {
                return;
            }
            if input.changed().await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = over => {}
        () = forward => {}
    }
}
