"""Certificates for the proxy's tests."""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Authority:
    """Signs certificates for 127.0.0.1."""

    def __init__(self, folder):
        self.folder = folder
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test authority")])
        self.certificate = self._sign(self.name, self.key.public_key(), x509.BasicConstraints(True, None))
        self.ca_file = str(folder / "ca.pem")
        self._write(self.ca_file, self.certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str) -> tuple[str, str]:
        """(certificate file, key file)."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        certificate = self._sign(subject, key.public_key(), x509.BasicConstraints(False, None))
        files = str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key")
        self._write(files[0], certificate.public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        form = serialization.PrivateFormat.PKCS8
        self._write(files[1], key.private_bytes(serialization.Encoding.PEM, form, plain))
        return files

    def _sign(self, subject, public_key, constraints):
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(public_key)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1)).add_extension(constraints, critical=True)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return builder.add_extension(names, critical=False).sign(self.key, hashes.SHA256())

    @staticmethod
    def _write(path, data):
        with open(path, "wb") as file:
            file.write(data)
