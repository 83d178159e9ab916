use super::*;

// The broker forks, which a test with its several threads can't do: `tests/pager/remote.rs` runs a
// helper.

#[test]
fn a_request_reaches_the_broker_with_its_socket() {
    let (helpers, broker) = pair().unwrap();
    let helper = std::thread::spawn(move || helpers.run("pass", "registry.example"));
    let (request, mut answer) = broker.request().unwrap().expect("a request");
    assert_eq!(
        (request.name.as_str(), request.registry.as_str()),
        ("pass", "registry.example")
    );
    let output: Result<HelperOutput, String> = Ok(HelperOutput {
        succeeded: true,
        output: b"{}".to_vec(),
    });
    answer
        .write_all(&serde_json::to_vec(&output).unwrap())
        .unwrap();
    drop(answer);
    let output = helper.join().unwrap().unwrap();
    assert_eq!((output.succeeded, &output.output[..]), (true, &b"{}"[..]));
}

#[test]
fn a_helper_that_gets_no_answer_fails_with_a_sentence() {
    let (helpers, broker) = pair().unwrap();
    let helper = std::thread::spawn(move || helpers.run("pass", "registry.example"));
    drop(broker.request().unwrap());
    let error = helper.join().unwrap().err().unwrap();
    assert!(error.contains("the helper pass was not run"), "{error}");
}

#[test]
fn a_message_that_is_no_request_is_ignored() {
    let (helpers, broker) = pair().unwrap();
    let (socket, _ours) = UnixStream::pair().unwrap();
    let here = helpers.0.into_inner().unwrap();
    fds::send_with_fds(&here, b"{", &[socket.as_fd()]).unwrap();
    assert!(broker.request().unwrap().is_none());
    fds::send_with_fds(&here, br#"{"name":"a","registry":"b"}"#, &[]).unwrap();
    assert!(broker.request().unwrap().is_none(), "it has no socket");
}
