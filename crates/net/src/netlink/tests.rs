use super::channel::{AttributeIter, Message, Messages, find};
use super::{Batch, flags};
use proptest::prelude::*;

#[test]
fn a_batch_is_read_back_message_by_message() {
    let mut batch = Batch::new();
    batch.message(7, flags::CREATE, |body| {
        body.fixed(&[1, 0, 0, 0])
            .text(1, "abcde")
            .nested(2, |inner| {
                inner.number(3, 0x0102_0304).bytes(4, &[9]);
            });
    });
    batch.message(8, 0, |_| {});
    batch.seal(100, 1);
    let messages: Vec<Message> = Messages(&batch.bytes)
        .map(|it| it.expect("whole"))
        .collect();
    assert_eq!(messages.len(), 2);
    assert_eq!(
        (messages[0].kind, messages[0].flags, messages[0].sequence),
        (7, flags::CREATE | flags::REQUEST, 100)
    );
    assert_eq!(
        (messages[1].kind, messages[1].flags, messages[1].sequence),
        (8, flags::ACK | flags::REQUEST, 101)
    );
    let body = &messages[0].body[4..];
    assert_eq!(find(body, 1), Some(&b"abcde\0"[..]));
    let inner: Vec<_> = AttributeIter(find(body, 2).expect("nested")).collect();
    assert_eq!(inner, [(3, &[1, 2, 3, 4][..]), (4, &[9][..])]);
}

#[test]
fn a_message_longer_than_its_buffer_is_the_last_and_an_error() {
    let mut bytes = vec![0; 16];
    bytes[..4].copy_from_slice(&400u32.to_ne_bytes());
    let mut messages = Messages(&bytes);
    assert!(messages.next().expect("one").is_err());
    assert!(messages.next().is_none());
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_within_bounds(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut seen = 0;
        for message in Messages(&bytes).flatten() {
            seen += 16 + message.body.len();
            for (_, value) in AttributeIter(message.body) {
                prop_assert!(value.len() <= message.body.len());
            }
        }
        prop_assert!(seen <= bytes.len());
    }
}
