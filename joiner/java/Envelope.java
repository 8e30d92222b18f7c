package roostream;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/**
 * The two byte layouts exchanged between Java and Python (joiner/envelope.py), little-endian:
 *
 * <pre>
 * in:  topic u8 · partition i32 · offset i64 · timestamp i64 · key bytes i32 (-1 = null) · value bytes i32 (-1 = null) · key · value
 * out: topic u8 · timestamp i64 (MIN_VALUE = now) · key bytes i32 · key · value
 * </pre>
 *
 * One array a record costs one copy at the language border; a Row of six fields would cost six conversions.
 */
final class Envelope {
    static final int IN_HEAD = 29;
    static final int OUT_HEAD = 13;
    private static final int OFFSET_AT = 5;
    private static final int TIMESTAMP_AT = 13;
    private static final int KEY_BYTES_AT = 21;

    private Envelope() {}

    static byte[] in(int topic, int partition, long offset, long timestamp, byte[] key, byte[] value) {
        int keyBytes = key == null ? 0 : key.length;
        int valueBytes = value == null ? 0 : value.length;
        ByteBuffer out = ByteBuffer.allocate(IN_HEAD + keyBytes + valueBytes).order(ByteOrder.LITTLE_ENDIAN);
        out.put((byte) topic).putInt(partition).putLong(offset).putLong(timestamp);
        out.putInt(key == null ? -1 : keyBytes).putInt(value == null ? -1 : valueBytes);
        if (key != null) {
            out.put(key);
        }
        if (value != null) {
            out.put(value);
        }
        return out.array();
    }

    /** The partition of an event topic, as one number. */
    static long partitionOf(byte[] in) {
        return (long) in[0] << 32 | ByteBuffer.wrap(in).order(ByteOrder.LITTLE_ENDIAN).getInt(1);
    }

    static long offsetOf(byte[] in) {
        return ByteBuffer.wrap(in).order(ByteOrder.LITTLE_ENDIAN).getLong(OFFSET_AT);
    }

    static long timestampOf(byte[] in) {
        return ByteBuffer.wrap(in).order(ByteOrder.LITTLE_ENDIAN).getLong(TIMESTAMP_AT);
    }

    /** Offset of the record's value, which ends with the array. */
    static int valueAt(byte[] in) {
        return IN_HEAD + Math.max(ByteBuffer.wrap(in).order(ByteOrder.LITTLE_ENDIAN).getInt(KEY_BYTES_AT), 0);
    }
}
