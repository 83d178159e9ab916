use super::*;
use proptest::prelude::*;
use std::string::ToString;
use std::vec;

fn body(message: &impl Serialize) -> Vec<u8> {
    let bytes = encode(message).unwrap();
    let (head, body) = bytes.split_first_chunk().unwrap();
    assert_eq!(length(*head), Ok(body.len()));
    body.to_vec()
}

fn failed(sentence: String) -> Answer {
    Answer::Failed(Failure {
        kind: FailureKind::Source,
        sentence,
    })
}

fn answers() -> Vec<Answer> {
    let words = || vec!["one".to_string(), String::new()];
    vec![
        Answer::Progress {
            done: 1,
            total: u64::MAX,
        },
        Answer::Made(Made {
            entries: 7,
            shares: true,
            config: Config {
                entrypoint: words(),
                cmd: words(),
                env: words(),
                workdir: "/srv".into(),
                user: String::new(),
                stop_signal: Some("SIGQUIT".into()),
                exposed_ports: words(),
                labels: vec![("a".into(), "b".into())],
            },
        }),
        failed("it can't be unpacked".into()),
    ]
}

#[test]
fn messages_arrive_as_they_were_sent() {
    for answer in answers() {
        assert_eq!(decode_answer(&body(&answer)), Ok(answer));
    }
    let layer = Layer {
        name: "blob".into(),
        media_type: "tar".into(),
        size: 9,
    };
    for source in [
        Source::Layers {
            config: vec![0xff, 0],
            layers: vec![layer; 3],
        },
        Source::Archive {
            reference: None,
            format: Some(ImportKind::Docker),
        },
        Source::Changes {
            parent: "p".into(),
            changes: "c".into(),
        },
    ] {
        let request = Request {
            source,
            folder: "/f".into(),
        };
        assert_eq!(decode_request(&body(&request)), Ok(request));
    }
}

#[test]
fn the_encoding_of_version_1_does_not_change() {
    let progress = Answer::Progress {
        done: 300,
        total: 1,
    };
    let expected = [8, 0, 0, 0, 1, 0, 0, 0, 0, 0xac, 2, 1];
    assert_eq!(encode(&progress).unwrap(), expected);
    let expected = [9, 0, 0, 0, 1, 0, 0, 0, 2, 0, 2, b'n', b'o'];
    assert_eq!(encode(&failed("no".into())).unwrap(), expected);
}

#[test]
fn another_version_is_refused_by_its_number() {
    let mut bytes = body(&answers()[0]);
    bytes[0] = 2;
    assert_eq!(decode_answer(&bytes), Err(MessageError::Version(2)));
}

#[test]
fn long_messages_lists_and_texts_are_refused() {
    let most = MAX_MESSAGE as u32;
    assert_eq!(length(most.to_le_bytes()), Ok(MAX_MESSAGE));
    for (bytes, refusal) in [
        (most + 1, MessageError::TooLong(MAX_MESSAGE + 1)),
        (u32::MAX, MessageError::TooLong(u32::MAX as usize)),
        (3, MessageError::Malformed(3)),
        (0, MessageError::Malformed(0)),
    ] {
        assert_eq!(length(bytes.to_le_bytes()), Err(refusal));
    }
    let long = failed("x".repeat(MAX_SENTENCE + 1));
    assert!(decode_answer(&body(&long)).is_err());
    assert!(encode(&failed("x".repeat(MAX_MESSAGE))).is_err());
    let layer = Layer {
        name: String::new(),
        media_type: String::new(),
        size: 0,
    };
    let request = Request {
        source: Source::Layers {
            config: Vec::new(),
            layers: vec![layer; MAX_LAYERS + 1],
        },
        folder: String::new(),
    };
    assert!(decode_request(&body(&request)).is_err());
}

#[test]
fn damaged_messages_are_refused() {
    for answer in answers() {
        let whole = body(&answer);
        for length in 0..whole.len() {
            assert!(decode_answer(&whole[..length]).is_err(), "{length}");
        }
        assert!(decode_answer(&[&whole[..], &[0]].concat()).is_err());
    }
    // A list of 2^64 - 1 texts, of which none is there.
    let endless = [&[1, 0, 0, 0, 1, 0, 0][..], &[0xff; 9], &[1]].concat();
    assert!(decode_answer(&endless).is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let bytes = [&VERSION.to_le_bytes()[..], &bytes].concat();
        if let Ok(answer) = decode_answer(&bytes) {
            prop_assert_eq!(decode_answer(&body(&answer)), Ok(answer));
        }
        let _ = decode_request(&bytes);
    }
}
