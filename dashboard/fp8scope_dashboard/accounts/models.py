"""Users, projects, and the API tokens of projects."""

from typing import ClassVar

from django.contrib.auth.models import AbstractUser
from django.contrib.postgres.fields import ArrayField
from django.core.validators import MaxLengthValidator, MaxValueValidator, MinValueValidator
from django.db import models
from django.utils import timezone

MIN_PRICE, MAX_PRICE = 0.0001, 1_000.0
"""Bounds of the price of a GPU hour."""


class Density(models.TextChoices):
    """The height of rows in the list of runs."""

    COMPACT = "compact"
    COMFORTABLE = "comfortable"


class User(AbstractUser):
    """A user, who signs in with a password, or once with a SignInLink."""

    time_zone = models.CharField(
        max_length=64, blank=True, default="", db_default="", help_text="For times on pages; empty: UTC."
    )
    list_density = models.CharField(
        max_length=16,
        choices=Density.choices,
        blank=True,
        default="",
        db_default="",
        help_text="Rows of the list of runs; empty: compact.",
    )


class Project(models.Model):
    """Owns runs, alert rules, channels and tokens. Users see the projects that they are members of."""

    slug = models.SlugField(max_length=64, unique=True)
    name = models.CharField(max_length=128)
    description = models.TextField(
        blank=True,
        default="",
        db_default="",
        validators=[MaxLengthValidator(2_000)],
        help_text="Shown with the project's name on the page of all projects.",
    )
    margin = models.FloatField(
        default=0.0025,
        validators=[MinValueValidator(1e-6), MaxValueValidator(1.0)],
        help_text="Relative difference of the loss below which FP8 and BF16 count as equivalent.",
    )
    alpha = models.FloatField(
        default=0.05,
        validators=[MinValueValidator(1e-6), MaxValueValidator(0.5)],
        help_text="Probability of a false alarm over a whole run. Intervals have the level 1 - alpha.",
    )
    raw_days = models.PositiveIntegerField(
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(36_500)],
        help_text="Days to keep tensor values; roll-ups and scalars are kept. Empty: keep everything.",
    )
    default_baseline = models.CharField(
        max_length=128,
        blank=True,
        default="",
        db_default="",
        help_text="Group that new FP8 runs are compared with if they name none; empty: none.",
    )
    gpu_hour_price = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(MIN_PRICE), MaxValueValidator(MAX_PRICE)],
        help_text="Price of a GPU hour, in the currency of the project; empty: no costs are shown.",
    )
    created_at = models.DateTimeField(default=timezone.now)
    # Archived projects are listed apart; their agents, rules and pages go on.
    archived_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering: ClassVar = ["slug"]

    def __str__(self) -> str:
        return self.slug


class Role(models.TextChoices):
    VIEWER = "viewer"
    MEMBER = "member"
    ADMIN = "admin"


class Membership(models.Model):
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.MEMBER)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["user", "project"], name="membership_once"),
        ]


class Scope(models.TextChoices):
    """A permission of a token. docs/wire.md has the scope that each endpoint needs."""

    WRITE = "write", "write runs"
    READ = "read", "read"
    # Includes reading: nobody can change rules without seeing them.
    ADMINISTER = "administer", "administer"


def default_scopes() -> list[str]:
    """The scopes of a token for training processes."""
    return [Scope.WRITE.value]


class ApiToken(models.Model):
    """A token of a project. Only its SHA-256 is stored; with 256 random bits it needs no slow hash."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=128)
    prefix = models.CharField(max_length=16, help_text="The first characters, to identify the token.")
    digest = models.BinaryField(max_length=32, unique=True)
    scopes = ArrayField(models.CharField(max_length=16, choices=Scope.choices), default=default_scopes)
    created_by = models.ForeignKey(User, null=True, on_delete=models.SET_NULL, related_name="+")
    created_at = models.DateTimeField(default=timezone.now)
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True, help_text="Null: when it is revoked.")
    # After a rotation the former secret works for a while beside the new one.
    rotated_at = models.DateTimeField(null=True, blank=True)
    former_digest = models.BinaryField(max_length=32, unique=True, null=True, blank=True)
    former_until = models.DateTimeField(null=True, blank=True)

    def may(self, scope: Scope) -> bool:
        """Return whether the token has this scope. *Administer* includes *read*."""
        return scope in self.scopes or (scope == Scope.READ and Scope.ADMINISTER in self.scopes)

    @property
    def is_expired(self) -> bool:
        """Return whether its time is over."""
        return self.expires_at is not None and self.expires_at <= timezone.now()

    @property
    def works(self) -> bool:
        """Return whether it is neither revoked nor expired."""
        return self.revoked_at is None and not self.is_expired

    @property
    def former_works(self) -> bool:
        """Return whether the secret from before the last rotation still works."""
        return self.works and self.former_until is not None and self.former_until > timezone.now()

    @property
    def scope_labels(self) -> str:
        """The scopes in words: `write runs, read`."""
        return ", ".join(str(Scope(scope).label) for scope in Scope.values if scope in self.scopes)


class SignInLink(models.Model):
    """A link that signs one user in, once, within its lifetime."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="+")
    digest = models.BinaryField(max_length=32, unique=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)


class Authenticator(models.Model):
    """A user's authenticator app: the second factor of their sign-in (RFC 6238)."""

    user = models.OneToOneField(User, on_delete=models.CASCADE, related_name="authenticator")
    sealed = models.TextField(help_text="The secret, encrypted; see db.encryption.")
    # Null until a first code has shown that the app has the secret.
    confirmed_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(default=timezone.now)
    # The number of the last interval whose code was used: no code works twice.
    last_interval = models.BigIntegerField(default=0)


class RecoveryCode(models.Model):
    """A code that takes the place of an authenticator's, once. Only its SHA-256 is stored."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="recovery_codes")
    digest = models.BinaryField(max_length=32)
    used_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["user", "digest"], name="recovery_code_once"),
        ]


class OidcIdentity(models.Model):
    """The account of a user with a provider of OpenID Connect. Its name may change; `subject` stays."""

    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="identities")
    issuer = models.CharField(max_length=500)
    subject = models.CharField(max_length=255)
    created_at = models.DateTimeField(default=timezone.now)
    signed_in_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["issuer", "subject"], name="oidc_identity_once"),
        ]
